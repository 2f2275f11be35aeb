"""The `checkpoints` folder of a run: names, order, which checkpoint is the newest. Opens no tensor file.

`step_00000100` is a checkpoint, `.saving-step_...` a save that has not ended, `.replaced-step_...` one that
another save of the same step is about to replace, `.trash-step_...` one that is being deleted.
"""

import os
import re
from pathlib import Path

from megadiff.checkpoint.index import Index, read_index
from megadiff.errors import CheckpointError

CHECKPOINTS = "checkpoints"
LATEST = "latest"
SAVING, REPLACED, TRASH = ".saving-", ".replaced-", ".trash-"

_STEP = re.compile(r"step_([0-9]{8,})")


def checkpoint_folder(root: Path, step: int) -> Path:
    """`root/step_00000100` for step 100."""
    return root / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder's name states, or None if it is not such a name."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_folders(root: Path) -> list[Path]:
    """Folders with a checkpoint's name in numeric order, complete or not; `[]` if there is no `root`."""
    if not root.is_dir():
        return []
    steps = {folder: step_of(folder) for folder in root.iterdir() if folder.is_dir()}
    return sorted((f for f, step in steps.items() if step is not None), key=lambda f: steps[f] or 0)


def list_complete(root: Path) -> list[Path]:
    """Complete checkpoints in numeric order (9000 before 10000)."""
    return [folder for folder in list_folders(root) if is_complete(folder)]


def is_complete(folder: Path) -> bool:
    """Whether the index is valid and every file that it lists is there with its length."""
    try:
        check_files(folder, read_index(folder))
    except CheckpointError:
        return False
    return True


def check_files(folder: Path, index: Index) -> None:
    """Checks presence and length of the files of a checkpoint.

    Raises:
        CheckpointError: naming the file and both lengths.
    """
    for name, record in index.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError:
            raise CheckpointError(f"{path} is missing, so the checkpoint is incomplete; choose another one") from None
        if found != record.bytes:
            raise CheckpointError(
                f"{path} has {found} bytes instead of {record.bytes}, so it is damaged; choose another checkpoint"
            )


def has_checkpoint(run_folder: Path) -> bool:
    """Whether a run folder holds anything to resume from; `find_checkpoint` then says what."""
    root = run_folder / CHECKPOINTS
    return (root / LATEST).exists() or bool(list_folders(root)) or bool(_replaced(root))


def find_checkpoint(path: Path) -> Path:
    """Finds the checkpoint folder that `path` means.

    Args:
        path: a run folder (which has `checkpoints/`), a `checkpoints` folder, or a checkpoint folder itself.

    Returns:
        The checkpoint folder. For the first two the one that `latest` names, else the newest complete one.

    Raises:
        CheckpointError: nothing there, or `latest` names no complete checkpoint.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}; give a run folder or a checkpoint folder")
    root = path / CHECKPOINTS
    if root.is_dir():
        return _newest(root)
    if (path / LATEST).exists() or list_folders(path) or _replaced(path):
        return _newest(path)
    read_index(path)
    return path


def _newest(root: Path) -> Path:
    latest = root / LATEST
    if latest.exists():
        return _named_by(latest)
    complete = list_complete(root) or [folder for folder in _replaced(root) if is_complete(folder)]
    if not complete:
        raise CheckpointError(f"{root} holds no complete checkpoint; nothing can be loaded from it")
    return complete[-1]


def _named_by(latest: Path) -> Path:
    root = latest.parent
    name = _read_latest(latest)
    if (root / name).is_dir():
        return root / name
    # A crash between the two renames of a replacement leaves the former checkpoint under this name.
    if (root / (REPLACED + name)).is_dir():
        return root / (REPLACED + name)
    found = ", ".join(folder.name for folder in list_complete(root)) or "none"
    raise CheckpointError(f"{latest} names {name}, which does not exist; write a complete one into it ({found})")


def _read_latest(latest: Path) -> str:
    try:
        name = latest.read_bytes()[:64].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if not _STEP.fullmatch(name):
        raise CheckpointError(f"{latest} does not hold the name of a checkpoint; write one into it or delete it")
    return name


def _replaced(root: Path) -> list[Path]:
    return sorted(root.glob(REPLACED + "step_*")) if root.is_dir() else []


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
