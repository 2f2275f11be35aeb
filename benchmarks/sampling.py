"""Fast sampling: each technique beside the plain alternative of fewer steps, one row a figure.

Solvers are measured on a distribution whose exact flow is known; dynamic steps, the feature cache and int8 weights on
small networks that are trained here at the first run (`sampling_rows/networks.py`).
"""

import argparse

import torch
from report import add_report_arguments, print_rows, write_json
from sampling_rows import cache, dynamic, int8, loop, solvers, throughput, trained_solvers

_MODULES = (solvers, trained_solvers, loop, throughput, dynamic, cache, int8)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for module in _MODULES for row in module.rows(arguments.quick)]
    print_rows(rows)
    if arguments.json:
        write_json(rows, arguments.json)


if __name__ == "__main__":
    main()
