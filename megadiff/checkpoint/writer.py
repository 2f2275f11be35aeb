"""Saving: each rank writes its pieces to one file, then one rank publishes the folder. Nothing is collective.

Order of a save: `begin_save` (one rank), `write_rank_file` (every rank), `build_index` and `publish` (one
rank); between them the caller makes all ranks agree. Until `publish` renames it nobody reads it.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megadiff.checkpoint.boxes import boxes_of_range
from megadiff.checkpoint.folders import (
    LATEST,
    REPLACED,
    SAVING,
    TRASH,
    check_files,
    checkpoint_folder,
    is_complete,
    sync_folder,
)
from megadiff.checkpoint.index import DTYPES, INDEX_NAME, DtypeName, Index, ManifestPiece, RankManifest
from megadiff.errors import CheckpointError

_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {dtype: name for name, dtype in DTYPES.items()}  # type: ignore[misc]


class Piece(NamedTuple):
    """A box of a logical tensor that this rank owns.

    Attributes:
        kind: what it is, for example `model`, `ema`, `optimizer.exp_avg`.
        name: global parameter name.
        global_shape: shape of the whole tensor.
        offset: first index of the box in each dim.
        size: extent of the box in each dim.
        tensor: the values, of shape `size` on any device.
    """

    kind: str
    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: torch.Tensor


def whole_piece(kind: str, name: str, tensor: torch.Tensor) -> Piece:
    """The piece that is a whole tensor."""
    shape = tuple(tensor.shape)
    return Piece(kind, name, shape, (0,) * len(shape), shape, tensor)


def pieces_of_range(
    kind: str,
    name: str,
    global_shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    start: int,
    values: torch.Tensor,
) -> list[Piece]:
    """Pieces of a flat fragment, as ZeRO holds it, of a box, as tensor parallelism cuts it.

    Args:
        kind: see `Piece`.
        name: see `Piece`.
        global_shape: shape of the whole tensor.
        offset: where the box lies in the whole tensor.
        size: shape of the box.
        start: flat row-major index in the box of the first value.
        values: (n,) the values of [start, start + n) of the box.
    """
    pieces = []
    for box in boxes_of_range(size, start, start + values.numel()):
        where = tuple(base + inner for base, inner in zip(offset, box.offset, strict=True))
        first = box.start - start
        part = values[first : first + math.prod(box.size)].view(box.size)
        pieces.append(Piece(kind, name, tuple(global_shape), where, box.size, part))
    return pieces


def begin_save(root: Path, step: int) -> Path:
    """Creates the empty temporary folder of a save and clears what interrupted saves left; one rank calls it.

    Returns:
        The folder for `write_rank_file` and `publish`.

    Raises:
        CheckpointError: nothing can be written there.
    """
    temporary = root / (SAVING + checkpoint_folder(root, step).name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _finish_replacements(root)
        for leftover in [*root.glob(SAVING + "*"), *root.glob(TRASH + "*")]:
            shutil.rmtree(leftover)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot save under {root}: {error}; choose another run folder") from None
    return temporary


def write_rank_file(folder: Path, rank: int, pieces: Iterable[Piece]) -> RankManifest:
    """Writes the pieces of one rank to `folder/rank_00000.safetensors`, synced to disk.

    Args:
        folder: what `begin_save` made.
        rank: this rank, which names the file.
        pieces: what this rank owns; together the ranks own every element exactly once.
            Empty pieces are left out.

    Raises:
        CheckpointError: the file cannot be written, or a piece's tensor does not have the stated size.
    """
    path = folder / f"rank_{rank:05d}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    records: list[ManifestPiece] = []
    addresses: set[int] = set()
    for piece in pieces:
        if math.prod(piece.size) == 0:
            continue
        key = f"{piece.kind}/{piece.name}#{len(records)}"
        tensors[key] = _host_copy(piece, addresses)
        records.append(_record(piece, key))
    save_tensors(tensors, path, {"format": "pt"})
    return RankManifest(
        rank=rank, file=path.name, bytes=path.stat().st_size, sha256=hash_file(path), pieces=tuple(records)
    )


def _host_copy(piece: Piece, addresses: set[int]) -> torch.Tensor:
    """The values on the CPU, contiguous, and not in the memory of a piece before (tied weights, B24)."""
    if tuple(piece.tensor.shape) != tuple(piece.size):
        raise CheckpointError(
            f"{piece.kind}/{piece.name}: a tensor of shape {tuple(piece.tensor.shape)} was given for a box "
            f"of size {tuple(piece.size)}; give the box's values"
        )
    tensor = piece.tensor.detach().cpu().contiguous()
    if tensor.data_ptr() in addresses:
        tensor = tensor.clone()
    addresses.add(tensor.data_ptr())
    return tensor


def _record(piece: Piece, key: str) -> ManifestPiece:
    dtype = _DTYPE_NAMES.get(piece.tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"{piece.kind}/{piece.name} is {piece.tensor.dtype}; use one of {', '.join(DTYPES)}")
    return ManifestPiece(
        kind=piece.kind,
        name=piece.name,
        shape=tuple(piece.global_shape),
        dtype=dtype,
        key=key,
        offset=tuple(piece.offset),
        size=tuple(piece.size),
    )


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file and waits until it is on the disk.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        save_file(tensors, path, metadata)
        sync_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}; free some space or choose another folder") from None


def publish(temporary: Path, final: Path, index: Index) -> None:
    """Makes a finished save visible: index.json, sync, rename, then `latest`. One rank calls it.

    A complete checkpoint of the same step stays until the new one has taken its place.

    Args:
        temporary: what `begin_save` made, with every rank's file in it.
        final: `checkpoint_folder(root, step)`.
        index: what `build_index` returned.

    Raises:
        CheckpointError: a file is missing or short, for example because the ranks do not share a file system.
    """
    check_files(temporary, index)
    try:
        _write_synced(temporary / INDEX_NAME, index.model_dump_json().encode())
        sync_folder(temporary)
        _rename_into_place(temporary, final)
        write_latest(final)
        for leftover in final.parent.glob(REPLACED + final.name):
            shutil.rmtree(leftover)
    except OSError as error:
        raise CheckpointError(f"cannot publish {final}: {error}; the checkpoints before it are untouched") from None


def _rename_into_place(temporary: Path, final: Path) -> None:
    if final.exists():
        aside = final.with_name((REPLACED if is_complete(final) else TRASH) + final.name)
        final.rename(aside)
    temporary.rename(final)
    sync_folder(final.parent)


def _finish_replacements(root: Path) -> None:
    """After a crash inside `publish`: puts the former checkpoint back, or drops it if replaced."""
    for aside in root.glob(REPLACED + "*"):
        final = root / aside.name.removeprefix(REPLACED)
        if is_complete(final):
            shutil.rmtree(aside)
        elif not final.exists():
            aside.rename(final)


def write_latest(folder: Path) -> None:
    """Points `latest` at a checkpoint folder, atomically."""
    temporary = folder.with_name("." + LATEST)
    _write_synced(temporary, (folder.name + "\n").encode())
    os.replace(temporary, folder.with_name(LATEST))
    sync_folder(folder.parent)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def hash_file(path: Path) -> str:
    """SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
