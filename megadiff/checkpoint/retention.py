"""Which checkpoints to delete. Called by one rank, and only after a new checkpoint was published."""

import shutil
from collections.abc import Collection
from pathlib import Path

from megadiff.checkpoint.folders import LATEST, TRASH, list_complete
from megadiff.errors import CheckpointError


def prune(root: Path, keep_last: int, protect: Collection[Path] = ()) -> list[Path]:
    """Deletes all but the last complete checkpoints.

    Args:
        root: the `checkpoints` folder.
        keep_last: how many to keep, counted in numeric order; 0 keeps all.
        protect: checkpoint folders that stay in any case, such as the one that the run was resumed from. What
            `latest` names stays too.

    Returns:
        The folders that are gone. Incomplete folders are neither counted nor touched.

    Raises:
        CheckpointError: a folder cannot be deleted.
    """
    if keep_last == 0:
        return []
    kept = {folder.name for folder in protect} | {_latest_name(root)}
    doomed = [folder for folder in list_complete(root)[:-keep_last] if folder.name not in kept]
    for folder in doomed:
        _delete(folder)
    return doomed


def _latest_name(root: Path) -> str:
    try:
        return (root / LATEST).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _delete(folder: Path) -> None:
    """Renames first, so that a half-deleted folder never carries a checkpoint's name."""
    trash = folder.with_name(TRASH + folder.name)
    try:
        folder.rename(trash)
        shutil.rmtree(trash)
    except OSError as error:
        raise CheckpointError(f"cannot delete the old checkpoint {folder}: {error}; delete it by hand") from None
