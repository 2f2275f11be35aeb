"""A folder that appears under its name only when everything in it is written."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from megadiff.checkpoint.folders import sync_folder
from megadiff.errors import CheckpointError


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `target` at the end, or removed after an error.

    Raises:
        CheckpointError: `target` exists, which is never overwritten, or cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already and is not overwritten; remove it or choose another name")
    temporary = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}; choose another place") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
