"""The first run, start to end: train on two ranks, sample, judge, export, and check the export against diffusers."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from megadiff.checkpoint.export import ExportSettings, export_weights
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.dist.launcher import free_port, run_command
from megadiff.engine.conditions import class_names
from megadiff.errors import LaunchError, MegadiffError

HERE = Path(__file__).resolve().parent
LARGEST_DIFFERENCE = 1e-4  # of diffusers' output from ours, relative to the largest value


def main(argv: Sequence[str]) -> None:
    """Runs all parts; each later part works on what the former one left in the run folder."""
    arguments = _parser().parse_args(argv)
    run, config = arguments.run_dir, load_config(arguments.config)
    started = time.perf_counter()
    settings = ["--config", str(arguments.config), "--run-dir", str(run), *_layout(arguments)]
    launch(arguments.num_ranks, "pretrain.py", *settings)
    trained = time.perf_counter()
    samples = run / "demo_samples"
    launch(
        arguments.num_ranks, "sample.py", "--checkpoint", str(run), "--num-images", str(arguments.num_images),
        "--output", str(samples), "--batch-size", "32",
    )  # fmt: skip
    print(f"\ntraining {trained - started:.0f} s, sampling {time.perf_counter() - trained:.0f} s")
    judge(config, samples)
    exported = export(run)
    compare_with_diffusers(run, exported)
    print(f"tensorboard   tensorboard --logdir {run / 'tensorboard'}")
    print(f"checkpoint    {find_checkpoint(run)}")
    print(f"export        {exported}")
    rows = ", ".join(class_names(find_checkpoint(run), config.model.num_classes))
    print(f"sample grid   {samples / 'grid.png'}  (rows: {rows})")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a YAML file on emoji pictures")
    parser.add_argument("--run-dir", type=Path, required=True, help="continued if it holds a checkpoint")
    parser.add_argument("--num-ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=2, help="of the training (default 2)")
    parser.add_argument("--num-images", type=int, default=12, help="samples of each class (default 12)")
    return parser


def _layout(arguments: argparse.Namespace) -> list[str]:
    return ["--tensor-model-parallel-size", str(arguments.tensor_model_parallel_size)]


def launch(num_ranks: int, script: str, *arguments: str) -> None:
    """Runs a launch script on several ranks under the DeepSpeed launcher.

    Raises:
        LaunchError: it failed; its own message is above.
    """
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(num_ranks)]
    command += ["--master_port", str(free_port()), str(HERE / script), *arguments]
    print("+", " ".join(command), flush=True)
    # The launcher starts `python` from the PATH for its ranks.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    code = subprocess.run(command, env={**os.environ, "PATH": path}, check=False).returncode
    if code:
        raise LaunchError(f"launch/{script} ended with exit code {code}; its message is above")


def judge(config: Config, samples: Path) -> None:
    """Prints how well a classifier that was fitted on real pictures recognises the samples."""
    import torch

    from megadiff.data import open_dataset
    from megadiff.data.dataset import to_signed_unit
    from megadiff.data.pixels import read_square_rgb
    from megadiff.evaluation.classifier import recognise

    plain = config.model_copy(update={"data": config.data.model_copy(update={"balanced": False})})
    dataset = open_dataset(plain)
    real = torch.stack([dataset.load(index)[0] for index in range(len(dataset))])
    paths = sorted(path for path in samples.glob("*.png") if path.name != "grid.png")
    fakes = torch.stack([to_signed_unit(read_square_rgb(path, config.model.input_size)) for path in paths])
    per_class = len(paths) // len(dataset.class_names)
    made_for = [index // per_class for index in range(len(paths))]
    result = recognise(real, dataset.labels, fakes, made_for)
    recall = ", ".join(f"{name} {value:.2f}" for name, value in zip(dataset.class_names, result.recall, strict=True))
    print(f"recognised    {recall}")
    print(
        f"classifier    balanced accuracy {result.real:.3f} on held-out real pictures, {result.samples:.3f} on samples "
        f"(ratio {result.ratio:.2f}, at least 0.60 wanted)"
    )


def export(run: Path) -> Path:
    """Exports the moving average in diffusers' layout beside the checkpoints."""
    target = run / f"diffusers_{find_checkpoint(run).name}"
    if not target.exists():
        export_weights(run, target, ExportSettings("diffusers"))
    return target


def compare_with_diffusers(run: Path, exported: Path) -> None:
    """Loads the export in diffusers and compares its output with ours on random inputs.

    Raises:
        MegadiffError: they differ.
    """
    import torch
    from diffusers import DiTTransformer2DModel

    from megadiff.dist import process
    from megadiff.engine.inference import Network

    checkpoint = find_checkpoint(run)
    with CheckpointReader(checkpoint) as reader:
        stored = reader.config()
    single = Config(model=stored.model, diffusion=stored.diffusion, data=stored.data)
    ours = Network(single, checkpoint, "ema", process.start(timeout_seconds=60))
    theirs = DiTTransformer2DModel.from_pretrained(exported).eval()
    generator = torch.Generator().manual_seed(0)
    model = stored.model
    x_t = torch.randn(8, model.in_channels, model.input_size, model.input_size, generator=generator)
    t = torch.randint(stored.diffusion.num_train_timesteps, (8,), generator=generator)
    labels = torch.randint(model.num_classes + 1, (8,), generator=generator)
    with torch.no_grad():
        expected, got = ours.predict(x_t, t, labels), theirs(x_t, t, labels).sample
    difference = float((expected - got).abs().max() / expected.abs().max())
    print(f"diffusers     loads {exported}; its outputs differ by {difference:.1e}")
    if difference > LARGEST_DIFFERENCE:
        raise MegadiffError(f"diffusers' outputs differ by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
