"""The same script under every launcher: the losses are those of one process, whoever starts the ranks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.dist.launcher import free_port
from tests.launch.running import DEEPSPEED, PRETRAIN, PYTHON, ROOT, SAMPLE, TORCHRUN, Running, losses, run, succeed

pytestmark = pytest.mark.slow

STEPS = 12
SHRUNK = (
    "--config", str(ROOT / "launch/configs/dit_demo.yaml"), "--model.num_layers", "2", "--train.global_batch_size", "8",
    "--train.steps", str(STEPS), "--optimizer.warmup_steps", "4", "--monitor.sample_every_steps", "0",
    "--monitor.log_every_steps", "1",
)  # fmt: skip
LAYOUT = (
    "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel",
)  # fmt: skip


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of 12 straight steps of one process, started without a launcher."""
    folder = tmp_path_factory.mktemp("single")
    succeed([PYTHON, PRETRAIN, *SHRUNK, "--run-dir", str(folder / "run")], folder)
    return folder / "run"


def assert_same_losses(run_dir: Path, single: Path, steps: int) -> None:
    """The run has exactly `steps` steps, with the losses of one process."""
    found = losses(run_dir)
    assert len(found) == steps
    np.testing.assert_allclose(found, losses(single)[:steps], rtol=1e-5, atol=0)


def test_python_alone_trains_without_a_launcher(single: Path) -> None:
    assert len(losses(single)) == STEPS
    assert (single / f"checkpoints/step_{STEPS:08d}/index.json").is_file()
    assert (single / "config.yaml").is_file()


def test_deepspeed_stops_and_torchrun_continues_on_another_layout(single: Path, tmp_path: Path) -> None:
    run_dir = ["--run-dir", str(tmp_path / "run")]
    launcher = [*DEEPSPEED, "--num_gpus", "4", "--master_port", str(free_port())]
    succeed([*launcher, PRETRAIN, *SHRUNK, *LAYOUT, *run_dir, "--train.stop_at_step", "6"], tmp_path)
    assert_same_losses(tmp_path / "run", single, 6)
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    done = succeed([*launcher, PRETRAIN, *SHRUNK, "--pipeline-model-parallel-size", "1", *run_dir], tmp_path)
    assert "at step 6" in done.out
    assert_same_losses(tmp_path / "run", single, STEPS)


def test_torchrun_starts_four_ranks_with_the_same_flags(single: Path, tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "4"]
    flags = [*SHRUNK, *LAYOUT, "--run-dir", str(tmp_path / "run"), "--train.stop_at_step", "3"]
    succeed([*launcher, PRETRAIN, *flags], tmp_path)
    assert_same_losses(tmp_path / "run", single, 3)


def test_two_torchrun_launchers_make_one_pipeline(single: Path, tmp_path: Path) -> None:
    """Two nodes on loopback, one rank each, which see the same run folder."""
    launcher = [
        *TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1",
        "--master_port", str(free_port()),
    ]  # fmt: skip
    flags = [
        *SHRUNK,
        "--pipeline-model-parallel-size",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        "--train.stop_at_step",
        "3",
    ]
    nodes = [Running([*launcher, "--node_rank", str(rank), PRETRAIN, *flags], tmp_path) for rank in range(2)]
    try:
        finished = [node.wait() for node in nodes]
    finally:
        for node in nodes:
            node.stop()
    assert [node.code for node in finished] == [0, 0], finished
    assert not any(node.survivors for node in finished)
    assert_same_losses(tmp_path / "run", single, 3)


def test_dry_run_prints_and_starts_nothing(tmp_path: Path) -> None:
    done = succeed([PYTHON, PRETRAIN, *SHRUNK, *LAYOUT, "--run-dir", str(tmp_path / "run"), "--dry-run"], tmp_path)
    assert "2 tensor x 2 pipeline x 1 data" in done.out and "hidden_size: 128" in done.out
    assert not (tmp_path / "run").exists()


def test_dry_run_under_a_launcher_prints_once(tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    done = succeed([*launcher, PRETRAIN, *SHRUNK, "--run-dir", str(tmp_path / "run"), "--dry-run"], tmp_path)
    assert done.out.count("1 tensor x 1 pipeline x 2 data") == 1
    assert not (tmp_path / "run").exists()


def test_samples_are_the_same_pictures_on_one_process_and_on_tensor_ranks(single: Path, tmp_path: Path) -> None:
    flags = ["--checkpoint", str(single), "--num-images", "1", "--class", "heart", "--class", "0", "--steps", "8"]
    layouts: dict[str, Sequence[str]] = {
        "one": [PYTHON, SAMPLE, *flags],
        "two": [
            *TORCHRUN,
            "--standalone",
            "--nproc_per_node",
            "2",
            SAMPLE,
            *flags,
            "--tensor-model-parallel-size",
            "2",
        ],
    }
    for name, command in layouts.items():
        succeed([*command, "--output", str(tmp_path / name)], tmp_path)
    names = sorted(path.name for path in (tmp_path / "one").glob("*.png"))
    assert names == sorted(path.name for path in (tmp_path / "two").glob("*.png")) and len(names) == 3
    for name in names:
        one, two = (np.asarray(Image.open(tmp_path / layout / name)).astype(int) for layout in layouts)
        assert one.std() > 1, name  # not a blank picture
        assert np.abs(one - two).max() <= 1, name


def test_samples_refuse_an_unknown_class_in_one_line(single: Path, tmp_path: Path) -> None:
    done = run([PYTHON, SAMPLE, "--checkpoint", str(single), "--class", "hart"], tmp_path)
    assert done.code == 2 and done.err.startswith("megadiff: error:") and done.err.count("\n") == 1
    assert "did you mean heart" in done.err
