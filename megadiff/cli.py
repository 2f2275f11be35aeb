"""`megadiff COMMAND ...`: the commands that need no launcher. Training starts with launch/pretrain.py."""

import argparse
import sys
from collections.abc import Callable, Sequence

from megadiff import __version__, cli_convert, cli_evaluate, cli_sample
from megadiff.dist.launcher import run_command


def _convert(argv: Sequence[str]) -> None:
    sys.exit(cli_convert.main(argv))


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "sample": (cli_sample.main, "make pictures from a run"),
    "evaluate": (cli_evaluate.main, "judge pictures against real ones"),
    "convert": (_convert, "export weights under other names, or import them"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names."""
    summary = "\n".join(f"  {name:8} {text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="megadiff",
        description=__doc__,
        epilog=f"commands:\n{summary}\n\n`megadiff COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megadiff {__version__}")
    parser.add_argument("command", choices=tuple(_COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(argv)
    run_command(_COMMANDS[chosen.command][0], chosen.arguments)


if __name__ == "__main__":
    main()
