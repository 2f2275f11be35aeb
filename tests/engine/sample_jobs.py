"""Runs `megadiff sample` on the processes of the pool."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from torch import Tensor

from megadiff import cli_sample
from megadiff.dist import process
from megadiff.engine.inference import Network
from megadiff.errors import MegadiffError
from megadiff.sampling.generate import ImageRequest
from tests.engine.runs import RUN_SECONDS
from tests.parity.jobs import this_process
from tests.pool import WorkerPool


@dataclass(frozen=True)
class SampleReport:
    """What one rank saw: class and message of the error or "", and the images (N, C, H, W) before 8 bits."""

    error: str
    images: Tensor | None


def sample_run(argv: list[str]) -> SampleReport:
    """The command on every rank of a pool, whose process group stays."""
    made: list[Tensor] = []

    def recorded(network: Network, request: ImageRequest) -> Tensor:
        made.append(generate(network, request))
        return made[-1]

    generate: Callable[[Network, ImageRequest], Tensor] = Network.generate
    with mock.patch.object(Network, "generate", recorded):
        error = request_run(argv)
    return SampleReport(error, made[-1] if made else None)


def request_run(argv: list[str]) -> str:
    """The command on every rank of a pool; class and message of its error or ""."""
    start = mock.patch.object(process, "start", lambda timeout_seconds: this_process())
    with start, mock.patch.object(process, "stop"):
        try:
            cli_sample.main(argv)
        except MegadiffError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def request(pool: WorkerPool, checkpoint: Path, *arguments: str) -> str:
    """Runs the command with a list of pictures on a pool; all ranks must end alike."""
    errors = pool.run(request_run, RUN_SECONDS, argv=["--checkpoint", str(checkpoint), *arguments])
    assert len(set(errors)) == 1, errors
    return str(errors[0])


def sample(pool: WorkerPool, checkpoint: Path, *arguments: str) -> SampleReport:
    """Runs the command on a pool; all ranks must end alike."""
    argv = ["--checkpoint", str(checkpoint), *arguments]
    reports = pool.run(sample_run, RUN_SECONDS, argv=argv)
    assert len({report.error for report in reports}) == 1, [report.error for report in reports]
    return reports[0]
