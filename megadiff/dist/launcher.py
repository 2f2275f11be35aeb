"""What the launcher told this process, and the one-line end of a run that cannot start. Imports no torch."""

import os
import socket
import sys
from collections.abc import Callable, Sequence

from megadiff.errors import MegadiffError


def launched_rank() -> int:
    """The rank that a launcher gave this process, 0 without one."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """The number of processes that the launcher started, 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def free_port() -> int:
    """A TCP port on loopback that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_first(text: str) -> None:
    """Prints on rank 0 only."""
    if launched_rank() == 0:
        print(text, flush=True)


def run_command(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Runs a command; an error that its user can mend becomes one line on stderr and exit code 2, on every rank."""
    try:
        main(argv)
    except MegadiffError as error:
        rank = f"[rank {launched_rank()}] " if launched_world_size() > 1 else ""
        print(f"{rank}megadiff: error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not sys.exit: a rank that waits in another rank's collective must not be waited for at interpreter exit.
        os._exit(2)
