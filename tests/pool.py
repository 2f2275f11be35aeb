"""A pool of gloo processes that lives as long as the test session and runs one job after the other.

A job is an importable function with picklable keyword arguments; it runs on every process of the pool at once, and
the results come back by rank. A job that fails or takes too long ends the processes; the next job starts new ones.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megadiff.dist.launcher import free_port

START_SECONDS = 300.0
JOB_SECONDS = 120.0
# Some of DeepSpeed's registries hold groups and engines until the process ends, so that it is replaced now and then.
_JOBS_OF_A_LIFE = 25
_GRACE_SECONDS = 3.0  # how long the others may go on after one process has failed
_GROUP_TIMEOUT_SECONDS = 1800  # longer than any job, so that the pool is the one who reports a hang


class JobError(AssertionError):
    """A job failed or hung; the message holds each process's traceback or stack."""


@dataclass(frozen=True)
class _Answer:
    """What one process said of a job: its result, or its traceback."""

    result: Any = None
    error: str | None = None


class WorkerPool:
    """`world_size` processes with a process group among them, started at the first job."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_starts = 0
        self._jobs_left = 0
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stacks: list[Path] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: Callable[..., Any], limit_seconds: float = JOB_SECONDS, **arguments: Any) -> list[Any]:
        """Runs `job(**arguments)` on every process.

        Args:
            job: a function that the processes can import.
            limit_seconds: after this long the processes are ended.
            arguments: for the job, the same on every rank.

        Returns:
            The results by rank.

        Raises:
            JobError: a process raised, ended, or took too long.
        """
        if self._jobs_left == 0:
            self.stop()
        if not self._processes:
            self._start()
        self._jobs_left -= 1
        request = pickle.dumps((job, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(request)
        answers = self._collect(limit_seconds)
        if all(answer is not None and answer.error is None for answer in answers):
            return [answer.result for answer in answers if answer is not None]
        stacks = self._ask_for_stacks(answers)
        self.stop()
        raise JobError(_report(job, answers, stacks, limit_seconds))

    def stop(self) -> None:
        """Ends the processes; they hold nothing that outlives a job."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._stacks, self._folder = [], [], [], None
        self._jobs_left = 0

    def _start(self) -> None:
        self.num_starts += 1
        self._jobs_left = _JOBS_OF_A_LIFE
        self._folder = tempfile.TemporaryDirectory(prefix="megadiff-pool-")
        port, context = free_port(), multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stack = Path(self._folder.name, f"stack_{rank}")
            arguments = (rank, self.world_size, port, theirs, str(stack))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._stacks.append(stack)
        answers = self._collect(START_SECONDS)
        if any(answer is None or answer.error for answer in answers):
            stacks = self._ask_for_stacks(answers)
            self.stop()
            raise JobError(_report(_serve, answers, stacks, START_SECONDS))

    def _collect(self, limit_seconds: float) -> list[_Answer | None]:
        """One answer from each process, None from those that gave none in time."""
        answers: list[_Answer | None] = [None] * self.world_size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + limit_seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                answers[rank] = _receive(pipe, self._processes[rank])
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers

    def _ask_for_stacks(self, answers: list[_Answer | None]) -> list[str]:
        """The Python stacks of the processes that gave no answer."""
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if silent else 0.0)
        return [path.read_text() if path.exists() else "" for path in self._stacks]


def _receive(pipe: Connection, process: BaseProcess) -> _Answer:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(_GRACE_SECONDS)
        return _Answer(error=f"the process ended with exit code {process.exitcode}")


def _report(job: Callable[..., Any], answers: list[_Answer | None], stacks: list[str], limit_seconds: float) -> str:
    lines = [f"{job.__module__}.{job.__qualname__} did not succeed on {len(answers)} processes"]
    for rank, (answer, stack) in enumerate(zip(answers, stacks, strict=True)):
        if answer is None:
            lines.append(f"[rank {rank}] no answer (limit {limit_seconds:g} s); its stack:\n{stack}")
        else:
            lines.append(f"[rank {rank}] {answer.error or 'succeeded'}")
    return "\n".join(lines)


def _serve(rank: int, world_size: int, port: int, pipe: Connection, stack_path: str) -> None:
    """The life of one process: joins the group, then answers jobs until the pipe closes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    stack_file = open(stack_path, "w")  # noqa: SIM115  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    _answer(pipe, _join_group)
    import torch

    plain_linear = torch.nn.functional.linear
    while True:
        try:
            job, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            sys.exit(0)
        if _answer(pipe, lambda job=job, arguments=arguments: job(**arguments)):
            _forget_job(plain_linear)  # after a failure the pool ends all its processes


def _answer(pipe: Connection, act: Callable[[], Any]) -> bool:
    """Sends what `act` returns, or its traceback; False if it failed."""
    try:
        message, is_good = pickle.dumps(_Answer(result=act())), True
    except Exception:
        message, is_good = pickle.dumps(_Answer(error=traceback.format_exc())), False
    pipe.send_bytes(message)
    return is_good


def _join_group() -> None:
    import warnings

    import torch

    from megadiff.dist.process import start

    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's and ours for names that torch will rename
    torch.set_num_threads(1)
    start(_GROUP_TIMEOUT_SECONDS)


def _forget_job(plain_linear: Callable[..., Any]) -> None:
    """Ends the job's engines and process groups and undoes what DeepSpeed set in module globals.

    Every group has threads that wake a hundred times a second: those of 25 jobs took a quarter of a core. Without the
    rest DeepSpeed would hand the next engine the former one's groups, and after a job under ZeRO 3 every linear layer
    of the process would be ZeRO 3's.
    """
    import gc

    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    engine = sys.modules.get("megadiff.engine.engine")  # whose import takes seconds: not for jobs without one
    for item in gc.get_objects() if engine is not None else ():
        if type(item) is engine.Engine:
            item.close()
    dist.barrier()  # no process leaves a group in which another still computes
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    groups.mpu = None
    groups._WORLD_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups.mesh_device = None
    torch.nn.functional.linear = plain_linear
    gc.collect()
