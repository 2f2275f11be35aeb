"""`megadiff evaluate`: how near generated pictures come to real ones, to a reference, and to their texts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megadiff.errors import ConfigError, DataError

if TYPE_CHECKING:  # imported late below, so that --help and wrong arguments need no torch
    import torch

    from megadiff.evaluation.evaluate import Evaluation, Inputs
    from megadiff.evaluation.images import ImageFiles, Images

_EPILOG = """examples:
  megadiff evaluate --real runs/demo --fake runs/demo/demo_samples --num-images 32 --output quality
  megadiff evaluate --real photos --fake samples --size 256 --features inception --weights pt_inception-....pth
  megadiff evaluate --real photos --fake few_steps --reference many_steps --lpips vgg16-....pth --clip clip-vit-base
"""


def main(argv: Sequence[str]) -> None:
    """Runs the command.

    Args:
        argv: the arguments, without the program's name.

    Raises:
        MegadiffError: what the user can mend.
    """
    arguments = _parser().parse_args(argv)
    _check(arguments)
    from megadiff.evaluation.evaluate import evaluate
    from megadiff.evaluation.extract import Work
    from megadiff.evaluation.picture import require_matplotlib

    if arguments.output:
        require_matplotlib()
    work = Work(arguments.batch_size, _device(arguments.device), arguments.threads)
    inputs = _open(arguments)
    found = evaluate(inputs, work)
    print(found.report.table())
    if arguments.output:
        _write(arguments.output, inputs, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff evaluate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--real", type=Path, required=True, help="a folder of PNG or JPEG files, or a run: the data that it learns")
    add("--fake", type=Path, required=True, help="a folder of generated PNG or JPEG files")
    add("--reference", type=Path, help="pictures of the same names, such as those of many steps: PSNR, SSIM")
    add("--features", default="embedded", help="embedded (default), inception, or a local folder of transformers")
    add("--weights", type=Path, help="of inception: pt_inception-2015-12-05-6726825d.pth")
    add("--clip", type=Path, help="a local folder of transformers' CLIPModel: how well texts are met")
    add("--lpips", type=Path, help="torchvision's vgg16-....pth: LPIPS to the reference")
    add("--size", type=int, help="cut all pictures to squares and resize them; default: they have one size")
    add("--num-images", type=int, help="of each, chosen at random; default: all, as many real ones as fakes")
    add("--neighbours", type=int, help="k; default 3 for precision and recall, 5 for density and coverage")
    add("--batch-size", type=int, default=64, help="pictures at once (default 64)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="pictures decoded at once (default: cores)")
    add("--device", help="such as cuda:1 or cpu; default: a GPU if there is one")
    add("--cache", type=Path, help="folder for features; default .features in the folders of the pictures")
    add("--output", type=Path, help="folder for quality.json and quality.png")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    least = {"size": 1, "num_images": 2, "neighbours": 1, "batch_size": 1, "threads": 1}
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} = {value} is too small; use {smallest} or more")
    if arguments.lpips and not arguments.reference:
        raise ConfigError("--lpips compares with a reference; give --reference, or leave it out")


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=name, dtype=torch.float64).device
    except (RuntimeError, AssertionError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(f"--device = {name} cannot be used ({line}); use cpu or cuda") from error


def _open(arguments: argparse.Namespace) -> Inputs:
    """Everything that is read, so that what is missing shows before anything is computed."""
    from megadiff.evaluation.evaluate import Inputs, check_comparable
    from megadiff.evaluation.lpips import load_lpips
    from megadiff.evaluation.pretrained import open_clip
    from megadiff.evaluation.spaces import open_space

    fake, reference = _open_fakes(arguments)
    real = _open_real(arguments)
    check_comparable(real, fake)
    caches = (_cache(arguments, arguments.real), _cache(arguments, arguments.fake))
    return Inputs(
        real=real,
        fake=fake,
        reference=reference,
        space=open_space(arguments.features, arguments.weights, caches[0]),
        lpips=load_lpips(arguments.lpips, "--lpips") if arguments.lpips else None,
        clip=open_clip(arguments.clip) if arguments.clip else None,
        neighbours=arguments.neighbours,
        caches=caches,
    )


def _open_fakes(arguments: argparse.Namespace) -> tuple[ImageFiles, ImageFiles | None]:
    from megadiff.evaluation.images import open_files
    from megadiff.evaluation.paired import check_pairs

    fake, count = open_files(arguments.fake, arguments.size, arguments.threads), arguments.num_images
    if arguments.reference is None:
        return (fake if count is None else fake.choose(count)), None
    reference = open_files(arguments.reference, arguments.size, arguments.threads)
    check_pairs(fake, reference, with_lpips=arguments.lpips is not None)
    return (fake, reference) if count is None else (fake.choose(count), reference.choose(count))


def _open_real(arguments: argparse.Namespace) -> Images:
    from megadiff.evaluation.images import open_files, open_training

    folder, size, count = arguments.real, arguments.size, arguments.num_images
    if not _is_run(folder):
        files = open_files(folder, size, arguments.threads)
        return files if count is None else files.choose(count)
    from megadiff.checkpoint.folders import find_checkpoint
    from megadiff.checkpoint.reader import CheckpointReader
    from megadiff.data.sources import open_dataset

    with CheckpointReader(find_checkpoint(folder)) as reader:
        config = reader.config()
    if size not in (None, config.model.input_size):
        raise ConfigError(f"--size = {size}, but {folder} learns {config.model.input_size} pixels; leave --size out")
    # A balanced run reads pictures of small classes again and again: each counts once here.
    config = config.model_copy(update={"data": config.data.model_copy(update={"balanced": False})})
    return open_training(f"{config.data.name} of {folder}", open_dataset(config), count)


def _is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / "index.json").is_file()


def _cache(arguments: argparse.Namespace, folder: Path) -> Path:
    from megadiff.evaluation.cache import FOLDER

    return arguments.cache or folder / FOLDER


def _write(folder: Path, inputs: Inputs, found: Evaluation) -> None:
    from megadiff.evaluation.picture import draw

    subject = found.report.subject
    title = f"{subject.fake} against {subject.real}, in features of {subject.features}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found.report.to_json(), indent=2)
        (folder / "quality.json").write_text(text + "\n", encoding="utf-8")
        draw(folder / "quality.png", inputs.real, inputs.fake, found.real, found.fake, title)
    except OSError as error:
        raise DataError(f"cannot write {folder} ({error}); choose another folder with --output") from error
    print(f"\nwrote {folder / 'quality.json'} and {folder / 'quality.png'}")
