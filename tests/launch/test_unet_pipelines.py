"""The UNet demo in a pipeline of two ranks: either schedule gives the losses and the pictures of one process."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.dist.launcher import free_port
from tests.launch.running import DEEPSPEED, PRETRAIN, PYTHON, ROOT, SAMPLE, TORCHRUN, losses, succeed

pytestmark = pytest.mark.slow

STEPS = 6
SHRUNK = (
    "--config", str(ROOT / "launch/configs/unet_demo.yaml"), "--train.global_batch_size", "8",
    "--train.stop_at_step", str(STEPS), "--monitor.sample_every_steps", "0", "--monitor.log_every_steps", "1",
)  # fmt: skip
PIPELINE = ("--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of one process."""
    folder = tmp_path_factory.mktemp("single")
    succeed([PYTHON, PRETRAIN, *SHRUNK, "--run-dir", str(folder / "run")], folder)
    return folder / "run"


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_both_schedules_give_the_losses_of_one_process(single: Path, schedule: str, tmp_path: Path) -> None:
    launcher = [*DEEPSPEED, "--num_gpus", "2", "--master_port", str(free_port())]
    flags = [*SHRUNK, *PIPELINE, "--pipeline-schedule", schedule, "--run-dir", str(tmp_path / "run")]
    succeed([*launcher, PRETRAIN, *flags], tmp_path)
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    np.testing.assert_allclose(found, losses(single), rtol=1e-5, atol=0)


def test_samples_of_a_folded_pipeline_are_those_of_one_process(single: Path, tmp_path: Path) -> None:
    flags = ["--checkpoint", str(single), "--num-images", "3", "--class", "heart", "--steps", "4"]
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    succeed([PYTHON, SAMPLE, *flags, "--output", str(tmp_path / "one")], tmp_path)
    succeed([*launcher, SAMPLE, *flags, *PIPELINE, "--output", str(tmp_path / "two")], tmp_path)
    names = sorted(path.name for path in (tmp_path / "one").glob("*.png"))
    assert names == sorted(path.name for path in (tmp_path / "two").glob("*.png")) and len(names) > 3
    for name in names:
        one, two = (np.asarray(Image.open(tmp_path / layout / name)).astype(int) for layout in ("one", "two"))
        assert one.std() > 1, name  # not a blank picture
        assert np.abs(one - two).max() <= 1, name  # a level of 255, where a value is rounded the other way
