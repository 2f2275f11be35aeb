"""`megadiff sample`: pictures of chosen classes or texts, or of a list, from a run's weights, on any layout."""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadiff.config.schema import Config
from megadiff.dist.launcher import launched_rank, launched_world_size, print_first
from megadiff.errors import ConfigError, DataError

if TYPE_CHECKING:  # torch stays away until the arguments are checked
    from megadiff.dist.process import Process
    from megadiff.engine.conditions import Conditions
    from megadiff.engine.inference import Network

_EPILOG = """examples:
  python launch/sample.py --checkpoint runs/demo --class clock --num-images 16 --seed 1
  python launch/sample.py --checkpoint runs/demo --num-images 4              # four of every class
  python launch/sample.py --checkpoint runs/demo --solver dpmpp_2m --steps 12
  python launch/sample.py --checkpoint runs/demo --quantization int8       # about a quarter of the memory
  torchrun --nproc_per_node 2 launch/sample.py --checkpoint runs/demo --tensor-model-parallel-size 2
  torchrun --nproc_per_node 2 launch/sample.py --checkpoint runs/demo --requests list.jsonl   # goes on if run again
"""
_NUM_IMAGES = 4
# Flags that stand for the settings of SamplingConfig with their names.
_SAMPLING: dict[str, dict[str, Any]] = {
    "solver": {"help": "ddim, ddpm, euler, heun, unipc, dpmpp_2m and others, see docs/sampling.md"},
    "steps": {"type": int, "help": "noise levels, at each of which the network is called once, by heun twice"},
    "timestep_spacing": {"metavar": "NAME", "help": "trailing, leading, linspace, karras or exponential"},
    "flow_shift": {"type": float, "help": "above 1 spends more steps at high noise"},
    "guidance": {"type": float, "help": "classifier-free guidance; 1 is none"},
    "guidance_interval": {"type": float, "nargs": 2, "metavar": ("LOW", "HIGH"), "help": "times at which it acts"},
    "guidance_rescale": {"type": float, "help": "0 to 1: mends the contrast that guidance adds"},
    "cache_threshold": {
        "type": float,
        "help": "cosine above which features are reused, such as 0.98; 1 reuses none",
    },
    "dynamic_steps": {"metavar": "RULE", "help": "spectrum or seed: each picture chooses its steps, --steps at most"},
    "text_guard": {"metavar": "NAME", "help": "strokes, ocr or module:function: short steps where it sees text"},
    "eta": {"type": float, "help": "0 is deterministic DDIM, 1 is ancestral"},
}


def main(argv: Sequence[str]) -> None:
    """Runs the command on every rank that the launcher started; each writes its pictures of a list, else rank 0 all.

    Args:
        argv: the arguments, without the program's name.

    Raises:
        MegadiffError: what the user can mend.
    """
    arguments = _parser().parse_args(argv)
    _check(arguments)
    from megadiff.checkpoint.folders import find_checkpoint
    from megadiff.checkpoint.reader import CheckpointReader
    from megadiff.dist import process
    from megadiff.engine.conditions import conditions_of

    folder = find_checkpoint(arguments.checkpoint)
    with CheckpointReader(folder) as reader:
        config = _settings(reader.config(), arguments)
    _check_pictures(config)
    kind = config.model.condition
    if arguments.classes and kind != "class":
        raise ConfigError(f"--class has no meaning for a network with model.condition = {kind}; remove it")
    conditions = conditions_of(config.model, folder, arguments.condition)
    make = _make_requests if arguments.requests else _make_grid
    make(arguments, config, folder, conditions)
    process.stop()


def _make_grid(arguments: argparse.Namespace, config: Config, folder: Path, conditions: "Conditions") -> None:
    """As many pictures of each chosen condition as are asked for, in files and in one grid."""
    from megadiff.dist import process
    from megadiff.sampling.generate import ImageRequest
    from megadiff.sampling.images import grid, save_png

    rows = [conditions.number(text, "--class") for text in arguments.classes] or range(len(conditions.names))
    columns, seed = arguments.num_images or _NUM_IMAGES, arguments.seed or 0
    shown = [row for row in rows for _ in range(columns)]
    here = process.start(config.parallel.timeout_seconds)
    network = _network(arguments, config, folder, here)
    wanted = ImageRequest([conditions.values[row] for row in shown], range(len(shown)), seed, arguments.batch_size)
    images = network.generate(wanted)
    _tell_cost(network)
    if not here.is_first:
        return
    output: Path = arguments.output or arguments.checkpoint / f"samples_seed_{seed}"
    for index, (image, row) in enumerate(zip(images, shown, strict=True)):
        name = conditions.names[row].replace("/", "_").replace(" ", "_")
        save_png(image, output / f"{index:05d}_{name}.png")
    save_png(grid(images, columns), output / "grid.png")
    print_first(f"wrote {len(images)} images and {output / 'grid.png'}")


def _make_requests(arguments: argparse.Namespace, config: Config, folder: Path, conditions: "Conditions") -> None:
    """The pictures of a list; its bad lines are told first, and end the command with an error after the good ones."""
    from megadiff.checkpoint.index import INDEX_NAME
    from megadiff.dist import process
    from megadiff.engine.queue import Queue, run_queue
    from megadiff.sampling.requests import read_requests

    lines, bad = read_requests(arguments.requests, config, conditions.take)
    if launched_rank() == 0:
        for line in bad:
            print(f"{arguments.requests} {line}", file=sys.stderr, flush=True)
    here = process.start(config.parallel.timeout_seconds)
    on_cpu = here.device.type == "cpu"
    for name, idle in (("streams", 1), ("empty_cache_every", 0)):
        if on_cpu and getattr(arguments, name) != idle:
            raise ConfigError(f"{_flag(name)} has no effect on a CPU; remove it")
    network = _network(arguments, config, folder, here)
    weights = hashlib.sha256((folder / INDEX_NAME).read_bytes()).hexdigest()[:16]
    source = {"checkpoint": f"{arguments.checkpoint.resolve().name}/{folder.name}", "index_sha256": weights}
    output: Path = arguments.output or arguments.checkpoint / arguments.requests.stem
    queue = Queue(
        output,
        source | {"weights": arguments.weights, "quantization": arguments.quantization},
        arguments.batch_size,
        arguments.streams,
        arguments.empty_cache_every,
    )
    started = time.perf_counter()
    made = run_queue(network, queue, lines)
    seconds = time.perf_counter() - started
    _tell_cost(network)
    print_first(
        f"made {made} images in {seconds:.1f} s ({made / seconds:.2f} images/s), {len(lines) - made} were in {output}"
    )
    if bad:
        raise DataError(f"{len(bad)} of {len(bad) + len(lines)} lines of {arguments.requests} were left out, see above")


def _tell_cost(network: "Network") -> None:
    print_first(f"the network gave {network.answers} answers on the first rank, two a call where guidance acts")
    reused = network.reused
    if reused.lookups:
        print_first(f"feature cache: {reused.share:.0%} of {reused.lookups} lookups on the first rank reused a part")


def _network(arguments: argparse.Namespace, config: Config, folder: Path, here: "Process") -> "Network":
    from megadiff.engine.inference import Network

    network = Network(config, folder, arguments.weights, here, arguments.quantization)
    if network.quantized is not None:
        print_first(f"quantization {arguments.quantization}: {network.quantized}")
    return network


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff sample",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a run folder (its latest checkpoint) or a checkpoint folder")
    add("--class", dest="classes", action="append", default=[], help="name or number; repeatable; default all")
    add("--condition", type=Path, help="safetensors file of texts: tokens (N, L, E), and pooled (N, P) if read")
    add("--num-images", type=int, help=f"images of each class or text (default {_NUM_IMAGES})")
    add("--seed", type=int, help="image k of a seed is the same picture on any layout (default 0)")
    add("--requests", type=Path, help="instead: a list of pictures to make, one JSON object a line")
    add("--output", type=Path, help="folder for the PNG files; default in the run folder, named after seed or list")
    add("--weights", choices=("ema", "raw"), default="ema", help="moving average (default) or raw weights")
    add("--quantization", choices=("none", "int8"), default="none", help="of the weights; int8 needs torchao")
    sampling = parser.add_argument_group("sampling", "what is not given is as in the run")
    for name, settings in _SAMPLING.items():
        sampling.add_argument("--" + name.replace("_", "-"), **settings)
    add("--batch-size", type=int, default=64, help="images at once on one rank (default 64)")
    add("--streams", type=int, default=1, help="with --requests on CUDA: batches under way at once (default 1)")
    add("--empty-cache-every", type=int, default=0, help="with --requests on CUDA: images; default 0, never")
    add("--tensor-model-parallel-size", type=int, default=1, help="tensor-parallel ranks (default 1)")
    add("--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages (default 1)")
    add("--sequence-parallel", action="store_true", help="shard tokens between tensor-parallel regions")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("num_images", 1), ("batch_size", 1), ("streams", 1), ("seed", 0), ("empty_cache_every", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"{_flag(name)} = {value} is too small; use {least} or more")
    if arguments.requests:
        for name in ("num_images", "seed"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"{_flag(name)} has no meaning beside --requests, where each line says it; remove it")
        if arguments.classes:
            raise ConfigError("--class has no meaning beside --requests, where each line says it; remove it")
    elif arguments.streams != 1 or arguments.empty_cache_every != 0:
        raise ConfigError("--streams and --empty-cache-every need --requests; remove them")
    if arguments.quantization == "int8" and arguments.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"--quantization int8 needs --tensor-model-parallel-size 1 instead of "
            f"{arguments.tensor_model_parallel_size}, as shards are not quantized; use data ranks or pipeline stages"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_pictures(config: Config) -> None:
    """Refuses latents before they are made, on every rank alike."""
    if config.model.in_channels not in (1, 3):
        raise DataError(
            f"the network makes latents of {config.model.in_channels} channels, which are no pictures; decode them "
            "with the VAE that they were stored with"
        )


def _settings(config: Config, arguments: argparse.Namespace) -> Config:
    """The run's settings with what the command line changes, checked again as a whole."""
    from megadiff.config.load import config_from_dict, config_to_dict

    values: dict[str, Any] = config_to_dict(config)
    values["sampling"] |= {name: getattr(arguments, name) for name in _SAMPLING if getattr(arguments, name) is not None}
    values["parallel"] = {
        "tensor_model_parallel_size": arguments.tensor_model_parallel_size,
        "pipeline_model_parallel_size": arguments.pipeline_model_parallel_size,
        "sequence_parallel": arguments.sequence_parallel,
    }
    # The batch triple and the optimizer's sharding belong to training, and may not fit this number of processes. A
    # folded pipeline asks for two micro-batches a rank.
    stages = arguments.pipeline_model_parallel_size
    accumulation, ranks = max(1, 2 * stages), max(1, arguments.tensor_model_parallel_size * stages)
    triple = {"micro_batch_size": 1, "gradient_accumulation_steps": accumulation}
    values["train"] |= {**triple, "global_batch_size": max(1, launched_world_size() // ranks) * accumulation}
    # What suited the training machine may be missing here, and flash attention has no float32.
    values["train"] |= {"precision": "fp32", "activation_checkpointing": "none", "norm_backend": "torch"}
    if config.train.attention_backend in ("flash", "flash_attn"):
        values["train"]["attention_backend"] = "auto"
    values["deepspeed"] = {}
    return config_from_dict(values, "the checkpoint with the command line")
