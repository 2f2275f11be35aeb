"""Runs a function on two gloo processes of one thread each, and collects what they return."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch

from megadiff.dist import process
from megadiff.dist.launcher import free_port
from megadiff.dist.process import Process

Result = TypeVar("Result")


def run_on_two(job: Callable[..., Result], *arguments: Any) -> list[Result]:
    """The results of `job(process, *arguments)` by rank; `job` is a function of a module.

    Raises:
        SystemExit: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[tuple[int, Result]] = context.SimpleQueue()
    port = free_port()
    ranks = [context.Process(target=_run, args=(job, arguments, rank, port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(f"a process of {job.__name__} failed; its error is above")
    return [result for _, result in sorted((results.get() for _ in ranks), key=lambda answer: answer[0])]


def _run(
    job: Callable[..., Result],
    arguments: tuple[Any, ...],
    rank: int,
    port: int,
    results: "SimpleQueue[tuple[int, Result]]",
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    this: Process = process.start(timeout_seconds=600)
    results.put((rank, job(this, *arguments)))
    process.stop()
