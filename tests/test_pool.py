"""The pool of processes: results by rank, failures and hangs reported, no leftovers from job to job."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.pool import JobError, WorkerPool


def multiply_rank(factor: int) -> int:
    """This rank times a factor, through a collective."""
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    ranks[dist.get_rank()] = dist.get_rank() * factor
    dist.all_reduce(ranks)
    return int(ranks[dist.get_rank()])


def make_groups(count: int) -> int:
    """Makes groups and leaves them behind; returns how many there were before."""
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(count):
        dist.new_group([0, 1])
    return before


def fail_on_rank_one() -> None:
    """Rank 1 raises while rank 0 waits for it."""
    if dist.get_rank() == 1:
        raise ValueError("seventeen is odd")
    dist.barrier()


def sleep_on_rank_one() -> None:
    """Rank 1 never comes to the barrier."""
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def end_on_rank_one() -> None:
    """Rank 1 ends as a crash would end it."""
    if dist.get_rank() == 1:
        import os

        os._exit(9)
    dist.barrier()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A pool of its own, because these tests break it."""
    made = WorkerPool(2)
    yield made
    made.stop()


def test_results_come_by_rank_and_no_group_outlives_its_job(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes live for three jobs here."""
    monkeypatch.setattr("tests.pool._JOBS_OF_A_LIFE", 3)
    assert pool.run(multiply_rank, factor=3) == [0, 3]
    counts = [pool.run(make_groups, count=5)[0] for _ in range(4)]
    assert counts == [1, 1, 1, 1]
    assert pool.num_starts == 2
    pool.stop()  # so that the next test starts with a whole life


@pytest.mark.parametrize(
    ("job", "limit_seconds", "expected"),
    [
        (fail_on_rank_one, 60.0, ["ValueError: seventeen is odd", "in fail_on_rank_one"]),
        (sleep_on_rank_one, 2.0, ["no answer (limit 2 s)", "in sleep_on_rank_one"]),
        (end_on_rank_one, 60.0, ["[rank 1] the process ended with exit code 9", "in end_on_rank_one"]),
    ],
)
def test_failures_are_reported_with_stacks_and_the_next_job_runs(
    pool: WorkerPool, job: object, limit_seconds: float, expected: list[str]
) -> None:
    pool.run(multiply_rank, factor=1)
    processes, starts = list(pool._processes), pool.num_starts
    began = time.monotonic()
    with pytest.raises(JobError) as raised:
        pool.run(job, limit_seconds)
    assert time.monotonic() - began < 20
    assert all(text in str(raised.value) for text in expected), str(raised.value)
    assert not any(process.is_alive() for process in processes)
    assert pool.run(multiply_rank, factor=2) == [0, 2]
    assert pool.num_starts == starts + 1
