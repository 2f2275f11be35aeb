"""The rendezvous port: an explicit one is used, a busy one is one short error, and jobs do not mix (B37)."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megadiff.dist.launcher import free_port
from tests.launch.forked import run_ranks
from tests.launch.running import DEEPSPEED, TORCHRUN, Finished, Running, error_lines, run, succeed

MEET = str(Path(__file__).with_name("meet.py"))
DEFAULT_PORT = 29500  # of the DeepSpeed launcher


@contextlib.contextmanager
def busy_port(port: int = 0) -> Iterator[int]:
    """A port that a socket listens on; 0 chooses one."""
    with socket.socket() as holder:
        with contextlib.suppress(OSError):  # somebody else holds the asked one, which is as good
            holder.bind(("0.0.0.0", port))
            holder.listen()
            port = holder.getsockname()[1]
        yield port


def records(finished: Finished) -> list[dict[str, Any]]:
    """What the ranks printed; a launcher may put its own text before them on the line."""
    return [json.loads(found) for found in re.findall(r'\{"rank".*?\}', finished.out)]


def test_b37_a_busy_port_is_one_line_that_names_port_and_option(tmp_path: Path) -> None:
    with busy_port() as port:
        (rank,) = run_ranks(MEET, [], tmp_path, world_size=2, ranks=[0], variables={"MASTER_PORT": str(port)})
    assert rank.code == 2
    assert rank.err.startswith("[rank 0] megadiff: error:") and rank.err.count("\n") == 1, rank.err
    assert f"127.0.0.1:{port}" in rank.err and "--master_port" in rank.err and "--standalone" in rank.err


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [True, False])
def test_b37_deepspeed_on_a_busy_port_ends_with_the_short_error(explicit: bool, tmp_path: Path) -> None:
    with busy_port(0 if explicit else DEFAULT_PORT) as port:
        option = ["--master_port", str(port)] if explicit else []
        finished = run([*DEEPSPEED, "--num_gpus", "2", *option, MEET], tmp_path)
    assert finished.code != 0 and not finished.survivors
    assert any(str(port) in line and "--master_port" in line for line in error_lines(finished.text)), finished.text
    assert "Traceback" not in finished.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [(*DEEPSPEED, "--num_gpus", "2", "--master_port"), (*TORCHRUN, "--nproc_per_node", "2", "--master-port")],
    ids=["deepspeed", "torchrun"],
)
def test_b37_an_explicit_free_port_reaches_every_rank(launcher: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    finished = succeed([*launcher, str(port), MEET], tmp_path)
    assert sorted((record["rank"], record["port"]) for record in records(finished)) == [(0, port), (1, port)]


@pytest.mark.slow
def test_b37_two_jobs_at_once_keep_apart(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", MEET]
    jobs = {name: Running(command, tmp_path, {"JOB": name}) for name in ("first", "second")}
    try:
        finished = {name: job.wait() for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.stop()
    for name, job in finished.items():
        assert job.code == 0, job.text
        assert [record["met"] for record in records(job)] == [[name, name]] * 2, job.out
