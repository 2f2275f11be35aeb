"""One rank dies and the others hang: whatever happens to rank 1, the launcher and all ranks are gone soon (B36)."""

import os
from pathlib import Path

import pytest

from megadiff.dist.launcher import free_port
from tests.launch.running import DEEPSPEED, TORCHRUN, Finished, error_lines, run
from tests.launch.tiny import TINY

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("faulty_pretrain.py"))
LIMIT_SECONDS = 30.0  # from the fault to the end of everything, on a machine with a core for each process
LAUNCHERS = {
    "torchrun": (*TORCHRUN, "--standalone", "--nproc_per_node", "2"),
    "deepspeed": (*DEEPSPEED, "--num_gpus", "2"),
}


def limit_seconds() -> float:
    """The limit, longer where other work has the cores; a hang lasts for parallel.timeout_seconds = 1800."""
    return LIMIT_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run_with_fault(launcher: str, fault: str, folder: Path, *flags: str) -> Finished:
    """Trains on two data-parallel ranks until rank 1 fails; checks that the end came soon and is complete."""
    command = list(LAUNCHERS[launcher])
    if launcher == "deepspeed":
        command += ["--master_port", str(free_port())]
    moment = folder / "fault_time"
    variables = {"FAULT": fault, "FAULT_TIME": str(moment)}
    finished = run([*command, SCRIPT, *TINY, *flags, "--run-dir", str(folder / "run")], folder, variables)
    assert moment.exists(), f"the fault did not happen\n{finished.text}"
    assert finished.ended_at - float(moment.read_text()) < limit_seconds(), finished.text
    assert finished.code != 0, finished.text
    assert not finished.survivors, finished.survivors
    return finished


@pytest.mark.parametrize("fault", ["before_init", "between_collectives"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_b36_the_cause_of_an_exception_is_shown(launcher: str, fault: str, tmp_path: Path) -> None:
    finished = run_with_fault(launcher, fault, tmp_path)
    assert f"RuntimeError: injected fault {fault}" in finished.text


@pytest.mark.parametrize("fault", ["killed", "exits_0"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_b36_a_rank_that_vanishes_ends_the_run(launcher: str, fault: str, tmp_path: Path) -> None:
    run_with_fault(launcher, fault, tmp_path)


def test_b36_a_rank_that_leaves_before_the_others_meet_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    """No launcher takes exit code 0 for a failure, so parallel.timeout_seconds is what ends the wait."""
    finished = run_with_fault("torchrun", "exits_0_before_init", tmp_path, "--parallel.timeout_seconds", "10")
    assert any("the processes cannot meet" in line for line in error_lines(finished.text)), finished.text
