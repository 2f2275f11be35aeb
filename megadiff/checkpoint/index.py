"""index.json: which box of which tensor lies in which file. Typed, strict, checked for complete coverage."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megadiff.checkpoint.boxes import intersect
from megadiff.errors import CheckpointError

INDEX_NAME = "index.json"

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

DtypeName = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
# The pattern admits no separator, so that no entry of an index can point outside its folder.
FileName = Annotated[str, Field(pattern=r"^rank_[0-9]{5,}\.safetensors$")]
Sizes = tuple[Annotated[int, Field(ge=0)], ...]
Counters = dict[str, int | float]


class Record(BaseModel):
    """A part of the index: unknown keys are refused and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PieceRecord(Record):
    """One stored box: tensor `key` of `file` is the part of the logical tensor at `offset` of `size`."""

    file: FileName
    key: str
    offset: Sizes
    size: Sizes


class TensorRecord(Record):
    """A logical tensor: global shape, dtype, and the boxes that make it up."""

    shape: Sizes
    dtype: DtypeName
    pieces: tuple[PieceRecord, ...]


class FileRecord(Record):
    """Length in bytes and SHA-256 (hex) of a file."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ManifestPiece(Record):
    """What one rank wrote of one tensor."""

    kind: Annotated[str, Field(pattern=r"^[^/]+$")]
    name: Annotated[str, Field(min_length=1)]
    shape: Sizes
    dtype: DtypeName
    key: str
    offset: Sizes
    size: Sizes


class RankManifest(Record):
    """Everything that one rank wrote; `model_dump_json` and `model_validate_json` carry it between ranks."""

    rank: Annotated[int, Field(ge=0)]
    file: FileName
    bytes: Annotated[int, Field(ge=0)]
    sha256: str
    pieces: tuple[ManifestPiece, ...]


class Index(Record):
    """The whole of index.json. Tensor names are `kind/parameter name`."""

    format: Literal["megadiff-checkpoint"] = "megadiff-checkpoint"
    version: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    counters: Counters
    config: dict[str, Any]
    data_fingerprint: str = ""
    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]


def build_index(
    step: int,
    counters: Counters,
    config_dict: dict[str, Any],
    manifests: Iterable[RankManifest],
    data_fingerprint: str = "",
) -> Index:
    """Joins what the ranks wrote and checks that every tensor is covered completely and only once.

    Args:
        step: optimizer steps done, which also names the folder.
        counters: numbers to restore (samples, ema_updates, ...); ints or finite floats.
        config_dict: the resolved `Config.model_dump(mode="json")`.
        manifests: one per rank, in any order.
        data_fingerprint: of the data set that was trained on, empty if none was.

    Raises:
        CheckpointError: two ranks disagree on a tensor's shape or dtype, or a part is missing or there twice.
    """
    files: dict[str, FileRecord] = {}
    shapes: dict[str, tuple[tuple[int, ...], DtypeName]] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    for manifest in sorted(manifests, key=lambda one: one.rank):
        if manifest.file in files:
            raise CheckpointError(f"two ranks wrote {manifest.file}; give each rank its own number")
        files[manifest.file] = FileRecord(bytes=manifest.bytes, sha256=manifest.sha256)
        for piece in manifest.pieces:
            name, seen = f"{piece.kind}/{piece.name}", (piece.shape, piece.dtype)
            if shapes.setdefault(name, seen) != seen:
                raise CheckpointError(
                    f"{name} is {shapes[name]} on one rank and {seen} on rank {manifest.rank}; "
                    "all ranks must state one global shape and dtype"
                )
            record = PieceRecord(file=manifest.file, key=piece.key, offset=piece.offset, size=piece.size)
            pieces.setdefault(name, []).append(record)
    tensors = {
        name: TensorRecord(shape=shape, dtype=dtype, pieces=tuple(pieces[name]))
        for name, (shape, dtype) in shapes.items()
    }
    index = Index(
        step=step,
        counters=counters,
        config=config_dict,
        data_fingerprint=data_fingerprint,
        files=files,
        tensors=tensors,
    )
    check_index(index, "the new checkpoint")
    return index


def read_index(folder: Path) -> Index:
    """Reads and checks `folder/index.json` (structure and coverage, not the files it names).

    Raises:
        CheckpointError: absent, not JSON, another format or version, or a tensor is not covered exactly once.
    """
    path = folder / INDEX_NAME
    try:
        index = Index.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {INDEX_NAME}, so it is not a complete checkpoint; choose another one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise CheckpointError(
            f"{path} is not the index of a megadiff checkpoint ({where}: {first['msg']}); choose another one"
        ) from None
    check_index(index, str(path))
    return index


def check_index(index: Index, source: str) -> None:
    """Checks that each piece names a listed file and that pieces cover each tensor completely and disjointly.

    Args:
        index: what to check.
        source: how the message calls it.

    Raises:
        CheckpointError: with the tensor's name.
    """
    for name, record in index.tensors.items():
        for piece in record.pieces:
            if piece.file not in index.files:
                raise CheckpointError(f"{source}: {name} refers to {piece.file}, which is not among its files")
            _check_piece(name, record.shape, piece, source)
        stored, wanted = sum(math.prod(piece.size) for piece in record.pieces), math.prod(record.shape)
        if stored < wanted:
            raise CheckpointError(f"{source}: {name} is incomplete, {stored} of {wanted} elements are stored")
        if stored > wanted or _overlaps(record.pieces):
            raise CheckpointError(f"{source}: parts of {name} are stored twice; each element needs one owner")


def _check_piece(name: str, shape: Sequence[int], piece: PieceRecord, source: str) -> None:
    fits = len(piece.offset) == len(piece.size) == len(shape) and all(
        size > 0 and offset + size <= extent
        for offset, size, extent in zip(piece.offset, piece.size, shape, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"{source}: the piece of {name} at {piece.offset} of size {piece.size} does not fit into {tuple(shape)}"
        )


def _overlaps(pieces: Sequence[PieceRecord]) -> bool:
    """Whether two boxes share an element: a sweep over dim 0, so nearly linear for row ranges."""
    if not pieces or not pieces[0].size:
        return len(pieces) > 1
    active: list[PieceRecord] = []
    for piece in sorted(pieces, key=lambda one: one.offset[0]):
        active = [one for one in active if one.offset[0] + one.size[0] > piece.offset[0]]
        if any(intersect(one.offset, one.size, piece.offset, piece.size) for one in active):
            return True
        active.append(piece)
    return False
