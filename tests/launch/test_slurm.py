"""The Slurm script, run as Slurm would run it, with stand-ins for `srun` and `scontrol`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/slurm/pretrain.sbatch"


def submit(folder: Path, arguments: list[str], **settings: str) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments that `srun` received and its environment."""
    commands = folder / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text("#!/bin/bash\nprintf 'node07\\nnode08\\n'\n")
    (commands / "srun").write_text(
        "#!/bin/bash\n"
        f'printf "%s\\0" "$@" > {folder}/arguments\n'
        f"env -0 > {folder}/environment\n"
        "exit ${SRUN_STATUS:-0}\n"
    )
    for command in commands.iterdir():
        command.chmod(0o755)
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        **settings,
    }
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, check=True, capture_output=True)
    received = (folder / "arguments").read_text().split("\0")[:-1]
    seen = dict(entry.split("=", 1) for entry in (folder / "environment").read_text().split("\0") if entry)
    return received, seen


def test_one_torchrun_a_node_meets_on_the_first_node(tmp_path: Path) -> None:
    flags = ["--config", "a file.yaml", "--tensor-model-parallel-size", "2"]
    received, environment = submit(tmp_path, flags)
    command = received[received.index(".venv/bin/torchrun") :]
    assert command[1:5] == ["--nnodes", "2", "--nproc_per_node", "8"]
    assert command[command.index("--rdzv_endpoint") + 1] == "node07:24242"
    assert command[command.index("launch/pretrain.py") :] == ["launch/pretrain.py", *flags]
    assert environment["OMP_NUM_THREADS"] == "8"


def test_two_jobs_on_a_node_use_different_ports(tmp_path: Path) -> None:
    received, _ = submit(tmp_path, [], SLURM_JOB_ID="4243")
    assert received[received.index("--rdzv_endpoint") + 1] == "node07:24243"


def test_a_container_image_is_used_when_given(tmp_path: Path) -> None:
    received, _ = submit(tmp_path, [], MEGADIFF_IMAGE="megadiff.sqsh")
    assert "--container-image=megadiff.sqsh" in received and "torchrun" in received


def test_a_failed_node_fails_the_job(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        submit(tmp_path, [], SRUN_STATUS="1")
    assert "--kill-on-bad-exit=1" in (tmp_path / "arguments").read_text()
