"""Tensors that are kept between calls: whole or absent, and refused where they are damaged."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.errors import DataError

FOLDER = ".features"  # beside the pictures; hidden, so that it is not taken for a class of them


def read_tensors(file: Path) -> dict[str, Tensor] | None:
    """The tensors of a cached file, None where there is none.

    Raises:
        DataError: the file is damaged.
    """
    if not file.is_file():
        return None
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise DataError(f"the cached file {file} is damaged ({error}); delete it") from error


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Writes a file that appears under its name only when it is whole.

    Raises:
        DataError: the folder cannot be written.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), partial, dict(metadata))
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot write {file} ({error}); free some space, or choose another folder") from error
