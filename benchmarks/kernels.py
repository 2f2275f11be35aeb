"""The fused kernels against PyTorch: time, bytes saved for the backward pass, and error, one row a figure.

On the CPU everything runs on one thread. Ours and the peer's calls alternate, and a ratio is one of medians, so that a
busy machine slows both. Buffers are kept between calls, because page faults of fresh memory would be measured else.
"""

import argparse
import os
import sys

import torch
from kernel_rows import ada_layer_norm, adamw_ema, diffuse, group_norm_silu, solver_step, weighted_mse
from report import add_report_arguments, print_rows, write_json

from megadiff.ops.library import library_error

# glibc gives large blocks back to the system at once by default; it reads these when a process starts.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
_MODULES = (group_norm_silu, ada_layer_norm, diffuse, weighted_mse, solver_step, adamw_ema)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=21, help="timed calls of each side")
    parser.add_argument("--only", help="the rows of one module")
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not _KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_KEEP_MEMORY})
    lacking = library_error(arguments.device)
    if lacking is not None:
        raise SystemExit(f"no kernels to measure: {lacking}")
    torch.set_num_threads(1)
    repeats = 3 if arguments.quick else arguments.repeats
    rows = [
        row
        for module in _MODULES
        if arguments.only in (None, module.__name__.rpartition(".")[2])
        for row in module.rows(repeats, arguments.quick, arguments.device)
    ]
    print_rows(rows)
    if arguments.json:
        write_json(rows, arguments.json)


if __name__ == "__main__":
    main()
