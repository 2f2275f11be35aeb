"""launch/pretrain.py with a fault on rank 1, named by FAULT; writes the time of the fault into FAULT_TIME."""

import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megadiff.data import Batch
from megadiff.dist import process
from megadiff.dist.launcher import launched_rank
from megadiff.engine.engine import Engine, StepResult

FAULT_STEP = 2
BEFORE_INIT = os.environ["FAULT"].endswith("before_init")
_train_step, _start = Engine.train_step, process.start


def fail() -> None:
    """What happens on rank 1."""
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    match os.environ["FAULT"]:
        case "before_init" | "between_collectives":
            raise RuntimeError(f"injected fault {os.environ['FAULT']}")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits_0" | "exits_0_before_init":
            sys.exit(0)


def start(timeout_seconds: int) -> process.Process:
    if BEFORE_INIT and launched_rank() == 1:
        fail()
    return _start(timeout_seconds)


def train_step(engine: Engine, micro_batches: Sequence[Batch]) -> StepResult:
    if not BEFORE_INIT and launched_rank() == 1 and engine.steps == FAULT_STEP:
        fail()
    return _train_step(engine, micro_batches)


if __name__ == "__main__":
    process.start, Engine.train_step = start, train_step  # type: ignore[method-assign]
    pretrain = Path(__file__).resolve().parents[2] / "launch/pretrain.py"
    runpy.run_path(str(pretrain), run_name="__main__")
