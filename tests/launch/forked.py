"""Runs scripts as ranks that are forked from a process with torch and DeepSpeed loaded: a rank starts in milliseconds.

Ranks get the environment that a launcher would give them, but no launcher that ends them: each ends by itself or the
test fails.
"""

import multiprocessing
import os
import runpy
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megadiff.dist.launcher import free_port

LIMIT_SECONDS = 300.0  # a rank takes a second or two; the machine may be busy

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["deepspeed", "megadiff.engine.trainer", "megadiff.engine.inference", "megadiff.checkpoint.export"]
)


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    out: str
    err: str


def run_ranks(
    script: str,
    arguments: Sequence[str],
    folder: Path,
    world_size: int = 1,
    ranks: Iterable[int] | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Runs a script on several ranks; a single one gets no launcher's variables.

    Args:
        script: a Python file.
        arguments: for it.
        folder: for the output.
        world_size: what the ranks are told.
        ranks: those to start; all by default.
        variables: more environment variables, over the launcher's.
    """
    port, number, started = free_port(), uuid.uuid4().hex, []
    for rank in range(world_size) if ranks is None else ranks:
        told = _launcher_variables(rank, world_size, port) if world_size > 1 else {}
        out, err = (folder / f"{number}_{rank}.{kind}" for kind in ("out", "err"))
        process = _CONTEXT.Process(
            target=_run_script, args=(script, list(arguments), {**told, **(variables or {})}, out, err)
        )
        process.start()
        started.append((process, out, err))
    deadline = time.monotonic() + LIMIT_SECONDS
    for process, _, _ in started:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, (process, _, _) in enumerate(started) if process.exitcode is None]
    for process, _, _ in started:
        process.kill()
        process.join()
    texts = [(out.read_text(errors="replace"), err.read_text(errors="replace")) for _, out, err in started]
    assert not hanging, f"ranks {hanging} did not end: {texts}"
    return [Ended(process.exitcode or 0, *text) for (process, _, _), text in zip(started, texts, strict=True)]


def _launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run_script(script: str, arguments: list[str], variables: Mapping[str, str], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for key in _launcher_variables(0, 1, 0):
        os.environ.pop(key, None)
    os.environ.update(variables)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
