"""Trains a network from scratch or continues a run: `launch/pretrain.py --config FILE --run-dir FOLDER ...`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.config.layout import resolve_layout
from megadiff.config.load import parse_command_line
from megadiff.dist.launcher import launched_world_size, print_first, run_command
from megadiff.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Parses, builds and trains. Torch is imported only once the settings are right."""
    invocation = parse_command_line(argv)
    if invocation.dry_run:
        from megadiff.engine.dry_run import describe

        config = invocation.config
        ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
        print_first(describe(config, resolve_layout(config, max(launched_world_size(), ranks))))
        return
    if invocation.run_dir is None:
        raise ConfigError("--run-dir is missing; name the folder for log, pictures and checkpoints")
    run_dir: Path = invocation.run_dir
    resolve_layout(invocation.config, launched_world_size())  # before torch is imported and processes meet
    from megadiff.dist import process
    from megadiff.engine.trainer import train

    train(invocation.config, run_dir, invocation.resume, process.start(invocation.config.parallel.timeout_seconds))
    process.stop()


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
