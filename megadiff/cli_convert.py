"""`megadiff convert`: weights out of a run under another project's names, or another project's into a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megadiff.config.load import load_config
from megadiff.errors import ConfigError, MegadiffError

_EXIT_ERROR = 2
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAMES = ("native", "diffusers", "facebookresearch")
_EPILOG = """examples:
  megadiff convert runs/emoji exported --to diffusers
  megadiff convert runs/emoji exported --to native --weights raw --dtype bfloat16 --max-shard-size 2GB
  megadiff convert DiT-XL-2-256/transformer runs/imported --from diffusers --accept-norm-eps
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit code; a `MegadiffError` is printed as one line and gives 2.

    Args:
        argv: the arguments, without the program's name.
    """
    arguments = _parser().parse_args(argv)
    try:
        _export(arguments) if arguments.to else _import(arguments)
    except MegadiffError as error:
        print(f"megadiff: error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    print(f"wrote {arguments.target}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megadiff convert",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a run or checkpoint folder; with --from a folder or file of weights")
    parser.add_argument("target", type=Path, help="the folder to write, which must not exist; with --from a run folder")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to", choices=_NAMES, help="export under these names")
    direction.add_argument("--from", dest="origin", choices=_NAMES, help="import from these names")
    parser.add_argument("--max-shard-size", default="5GB", help="largest file, such as 5GB or 500MiB (default 5GB)")
    export = parser.add_argument_group("export")
    export.add_argument("--weights", choices=("ema", "raw"), help="moving average (default) or raw weights")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32")
    imports = parser.add_argument_group("import")
    imports.add_argument("--config", type=Path, help="settings of the new run; its network must be that of the weights")
    imports.add_argument("--num-heads", type=int, help="attention heads, where the weights do not say")
    imports.add_argument(
        "--accept-norm-eps", action="store_true", help="take weights trained with another LayerNorm epsilon"
    )
    return parser


def _export(arguments: argparse.Namespace) -> None:
    _refuse(arguments, "--from", ("config", "num_heads", "accept_norm_eps"))
    max_shard_bytes = parse_size(arguments.max_shard_size)
    # Imported late, so that --help and wrong arguments need no torch.
    from megadiff.checkpoint.export import ExportSettings, export_weights

    settings = ExportSettings(
        convention=arguments.to,
        weights=arguments.weights or "ema",
        dtype=arguments.dtype or "float32",
        max_shard_bytes=max_shard_bytes,
    )
    export_weights(arguments.source, arguments.target, settings)


def _import(arguments: argparse.Namespace) -> None:
    _refuse(arguments, "--to", ("weights", "dtype"))
    max_shard_bytes = parse_size(arguments.max_shard_size)
    config = load_config(arguments.config) if arguments.config else None
    from megadiff.checkpoint.import_ import ImportSettings, import_weights

    settings = ImportSettings(
        convention=arguments.origin,
        config=config,
        num_heads=arguments.num_heads,
        accept_norm_eps=arguments.accept_norm_eps,
        max_shard_bytes=max_shard_bytes,
    )
    import_weights(arguments.source, arguments.target, settings)


def _refuse(arguments: argparse.Namespace, direction: str, names: Sequence[str]) -> None:
    """Refuses options that would have no effect in this direction."""
    for name in names:
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} belongs to {direction}; leave it out")


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MiB` or `1000`.

    Raises:
        ConfigError: another form, or zero.
    """
    digits = text.rstrip("BbGgIiKkMm ")
    unit = text[len(digits) :].strip().upper()
    if not digits.isdecimal() or unit not in _UNITS or int(digits) == 0:
        raise ConfigError(f"--max-shard-size = {text} is not a size; use for example 5GB or 500MiB")
    return int(digits) * _UNITS[unit]
