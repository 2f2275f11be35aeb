"""Converts weights: `python launch/convert.py --help`."""

import sys

from megadiff.cli_convert import main

sys.exit(main(sys.argv[1:]))
