"""Makes pictures from a run: `python launch/sample.py --help`."""

import sys

from megadiff.cli_sample import main
from megadiff.dist.launcher import run_command

if __name__ == "__main__":
    run_command(main, sys.argv[1:])
