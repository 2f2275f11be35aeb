"""The environment of every test, set before anything imports torch or DeepSpeed; pools of processes; the parity table.

Values that the caller has set win. Child processes (launchers, the pool of workers) inherit them.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis
import pytest

from tests.parity.report import Matrix

if "TORCH_EXTENSIONS_DIR" not in os.environ:
    # Private to this session: a killed build leaves a lock behind, on which the next one would wait forever.
    _extensions_dir = tempfile.mkdtemp(prefix="megadiff-torch-extensions-")
    _owner = os.getpid()

    def _remove_extensions_dir() -> None:
        if os.getpid() == _owner:  # a forked child runs the same exit handlers
            shutil.rmtree(_extensions_dir, ignore_errors=True)

    atexit.register(_remove_extensions_dir)
    os.environ["TORCH_EXTENSIONS_DIR"] = _extensions_dir

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # gloo, also on a machine with a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
os.environ.setdefault("MPLBACKEND", "Agg")

from tests.pool import WorkerPool  # after the environment is set, which torch reads

# Without deadlines, which a busy machine breaks, and with the same examples everywhere.
hypothesis.settings.load_profile("ci")

_MATRIX = pytest.StashKey[Matrix]()


@pytest.fixture(scope="session")
def pools() -> Iterator[Mapping[int, WorkerPool]]:
    """Pools of 1, 2 and 4 gloo processes, each started at its first job and ended with the session."""
    made = {world_size: WorkerPool(world_size) for world_size in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(scope="session")
def parity_matrix(request: pytest.FixtureRequest) -> Matrix:
    """Where the parity tests note their differences; printed at the end of the session."""
    return request.config.stash.setdefault(_MATRIX, Matrix())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the parity matrix of a worker of pytest-xdist to the process that prints it."""
    matrix = session.config.stash.get(_MATRIX, None)
    if matrix is not None and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity"] = list(matrix.rows.items())


class _Collector:
    """Takes the workers' matrices; a plug-in of its own, because its hook exists only beside pytest-xdist."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        rows = [(tuple(cell), differences) for cell, differences in getattr(node, "workeroutput", {}).get("parity", [])]
        node.config.stash.setdefault(_MATRIX, Matrix()).merge(rows)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Collector())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a worker of pytest-xdist runs in order: a file, for its fixtures; all launchers, for the ports they hold."""
    for item in items:
        folder, group = item.path.parent.name, str(item.path)
        if folder in ("launch", "hostcuda"):
            group = folder
        elif folder == "parity":  # large files whose tests share nothing but the pools
            group += f"::{item.name.partition('[')[0]}"
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the parity matrix among the results."""
    matrix = config.stash.get(_MATRIX, None)
    if matrix is not None and matrix.rows:
        terminalreporter.section("parity with one process (largest relative differences)")
        for line in matrix.lines():
            terminalreporter.write_line(line)
