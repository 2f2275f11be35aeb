"""`megadiff sample`: pictures of chosen classes or texts from a run's weights, on one process or any layout."""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megadiff.config.schema import Config, ModelConfig
from megadiff.dist.launcher import launched_world_size, print_first
from megadiff.errors import ConfigError, DataError

_EPILOG = """examples:
  python launch/sample.py --checkpoint runs/demo --class clock --num-images 16 --seed 1
  python launch/sample.py --checkpoint runs/demo --num-images 4              # four of every class
  torchrun --nproc_per_node 2 launch/sample.py --checkpoint runs/demo --tensor-model-parallel-size 2
"""


def main(argv: Sequence[str]) -> None:
    """Runs the command on every rank that the launcher started; rank 0 writes.

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
    from megadiff.engine.inference import Network
    from megadiff.sampling.generate import ImageRequest

    folder = find_checkpoint(arguments.checkpoint)
    with CheckpointReader(folder) as reader:
        config = _settings(reader.config(), arguments)
    _check_pictures(config)
    rows = _rows(config.model, folder, arguments)
    conditions = [condition for _, condition in rows for _ in range(arguments.num_images)]
    here = process.start(config.parallel.timeout_seconds)
    network = Network(config, folder, arguments.weights, here)
    request = ImageRequest(conditions, range(len(conditions)), arguments.seed, arguments.batch_size)
    images = network.generate(request)
    if here.is_first:
        _write(images, [name for name, _ in rows for _ in range(arguments.num_images)], arguments)
    process.stop()


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
    add("--num-images", type=int, default=4, help="images of each class or text (default 4)")
    add("--seed", type=int, default=0, help="image k of a seed is the same picture on any layout (default 0)")
    add("--output", type=Path, help="folder for the PNG files; default samples_seed_N beside the checkpoints")
    add("--weights", choices=("ema", "raw"), default="ema", help="moving average (default) or raw weights")
    add("--steps", type=int, help="network evaluations an image; default sampling.steps of the run")
    add("--guidance", type=float, help="classifier-free guidance; 1 is none; default sampling.guidance of the run")
    add("--eta", type=float, help="0 is deterministic DDIM, 1 is ancestral; default sampling.eta of the run")
    add("--batch-size", type=int, default=64, help="images at once on one rank (default 64)")
    add("--tensor-model-parallel-size", type=int, default=1, help="tensor-parallel ranks (default 1)")
    add("--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages (default 1)")
    add("--sequence-parallel", action="store_true", help="shard tokens between tensor-parallel regions")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _check(arguments: argparse.Namespace) -> None:
    for name in ("num_images", "batch_size"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} = {getattr(arguments, name)} is not positive; use 1 or more")


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
    values["sampling"] |= {
        key: getattr(arguments, key) for key in ("steps", "guidance", "eta") if getattr(arguments, key) is not None
    }
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


def _rows(model: ModelConfig, folder: Path, arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    """A name and a condition for each row of the grid.

    Raises:
        ConfigError: the network reads something else than what is given.
    """
    if arguments.classes and model.condition != "class":
        raise ConfigError(f"--class has no meaning for a network with model.condition = {model.condition}; remove it")
    if arguments.condition and model.condition != "text":
        raise ConfigError(
            f"--condition has no meaning for a network with model.condition = {model.condition}; remove it"
        )
    if model.condition == "class":
        names = class_names(folder, model.num_classes)
        chosen = [_class_number(text, names) for text in arguments.classes] or list(range(len(names)))
        return [(names[label], label) for label in chosen]
    if model.condition == "none":
        return [("image", 0)]
    from megadiff.data.tensor_files import read_texts, text_shape

    shape = text_shape(model)
    if arguments.condition is None or shape is None:
        raise ConfigError(
            "this network reads texts; give --condition FILE.safetensors with tokens (N, "
            f"{model.text_length}, {model.cross_attention_dim})"
            + (f" and pooled (N, {model.pooled_dim})" if model.pooled_dim else "")
        )
    return [(f"text {number}", text) for number, text in enumerate(read_texts(arguments.condition, shape))]


def class_names(checkpoint: Path, num_classes: int) -> list[str]:
    """The names that the run folder of a checkpoint keeps, or the numbers as names."""
    path = checkpoint.parent.parent / "classes.json"
    if not path.is_file():
        return [str(label) for label in range(num_classes)]
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); delete it to choose classes by number") from None
    if not isinstance(names, list) or len(names) != num_classes:
        raise DataError(f"{path} does not hold {num_classes} class names; delete it to choose classes by number")
    return [str(name) for name in names]


def _class_number(text: str, names: Sequence[str]) -> int:
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < len(names):
        return int(text)
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names[:20])}"
    raise ConfigError(f"--class {text} is not a class of this network; {hint}")


def _write(images: Any, names: Sequence[str], arguments: argparse.Namespace) -> None:
    from megadiff.sampling.images import grid, save_png

    root: Path = arguments.checkpoint
    folder = arguments.output or root / f"samples_seed_{arguments.seed}"
    for index, (image, name) in enumerate(zip(images, names, strict=True)):
        save_png(image, folder / f"{index:05d}_{name.replace('/', '_').replace(' ', '_')}.png")
    save_png(grid(images, columns=arguments.num_images), folder / "grid.png")
    print_first(f"wrote {len(images)} images and {folder / 'grid.png'}")
