"""Starts and ends the process group of a run; with launcher.py the only place that reads launcher variables."""

import contextlib
import datetime
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from megadiff.errors import LaunchError


@dataclass(frozen=True)
class Process:
    """This process among those of the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone prints and writes shared files."""
        return self.rank == 0


def start(timeout_seconds: int) -> Process:
    """Joins the process group that the launcher describes, or makes a group of one without a launcher.

    Uses NCCL on CUDA and gloo elsewhere (also with DS_ACCELERATOR=cpu). A group of one opens no port and sets
    no variable that tells a program which it starts that a launcher did.

    Raises:
        LaunchError: the rendezvous address cannot be used; the message names the port and the option to change it.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it without asking whether it is there
    use_cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
    if not use_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # thread pools as wide as the machine would fight over its cores
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    _init_deepspeed("nccl" if use_cuda else "gloo", datetime.timedelta(seconds=timeout_seconds))
    return Process(torch_dist.get_rank(), torch_dist.get_world_size(), local_rank, device)


def _init_deepspeed(backend: str, timeout: datetime.timedelta) -> None:
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # torch 2.13 renames these two; the old names are the only ones that torch 2.10 has.
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
    if backend == "gloo":
        # The helper for shared-memory all-reduce compiles for more than a minute on its first use; gloo serves.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        if "RANK" not in os.environ:  # DeepSpeed joins the group that it finds
            torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    except (torch_dist.DistNetworkError, torch_dist.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"the processes cannot meet at {address} ({reason}); choose a free port with --master_port "
            "(deepspeed) or --master-port (torchrun), or let torchrun choose one with --standalone"
        ) from error


def stop() -> None:
    """Leaves the process group after a run that ended well."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Hides what libraries print while they set themselves up."""
    with open(os.devnull, "w", encoding="utf-8") as sink, contextlib.redirect_stdout(sink):
        yield
