"""A checkpoint folder as logical tensors, whatever layout wrote it. JSON and safetensors only, no pickle.

Letters: d is the number of dims of a tensor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megadiff.checkpoint.boxes import boxes_of_range, intersect, slices
from megadiff.checkpoint.folders import check_files
from megadiff.checkpoint.index import DTYPES, Index, PieceRecord, TensorRecord, read_index
from megadiff.checkpoint.writer import hash_file
from megadiff.config.load import config_from_dict
from megadiff.config.progressive import stage_after
from megadiff.config.schema import Config
from megadiff.errors import CheckpointError, ConfigError


class CheckpointReader:
    """One checkpoint folder, opened and checked; a context manager. Files are opened when first read.

    Attributes:
        folder: where it lies.
        index: what index.json says.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the index and checks that every file is there with its length.

        Args:
            folder: a checkpoint folder; `find_checkpoint` finds it in a run folder.

        Raises:
            CheckpointError: incomplete, damaged, or not a checkpoint.
        """
        self.folder = folder
        self.index: Index = read_index(folder)
        check_files(folder, self.index)
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the open files."""
        self._files.clear()

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compares the checksums of this rank's share of the files; together `parts` calls check all of them.

        Raises:
            CheckpointError: naming the first file whose content changed.
        """
        assert 0 <= part < parts, (part, parts)
        for name in sorted(self.index.files)[part::parts]:
            path = self.folder / name
            try:
                digest = hash_file(path)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
            if digest != self.index.files[name].sha256:
                raise CheckpointError(
                    f"{path} does not have the checksum of {self.folder.name}, so it is damaged; "
                    "choose another checkpoint"
                )

    def config(self) -> Config:
        """The resolved config of the run that wrote it; of a progressive one, those of the stage it had come to.

        Raises:
            CheckpointError: it is not a config that this version understands.
        """
        try:
            config = config_from_dict(self.index.config, f"the config of {self.folder}")
            return stage_after(config, self.index.step).config
        except ConfigError as error:
            raise CheckpointError(f"{self.folder} cannot be used: {error}") from None

    def kinds(self) -> list[str]:
        """What is stored: `model`, `ema`, `optimizer.exp_avg` and so on, sorted."""
        return sorted({name.partition("/")[0] for name in self.index.tensors})

    def names(self, kind: str) -> list[str]:
        """Parameter names of one kind, in the order of the index; empty if there is no such kind."""
        start = kind + "/"
        return [name.removeprefix(start) for name in self.index.tensors if name.startswith(start)]

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self._record(kind, name).shape

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return DTYPES[self._record(kind, name).dtype]

    def check_shapes(self, kind: str, expected: Mapping[str, Sequence[int]]) -> None:
        """Checks that a kind holds exactly the tensors of a network.

        Args:
            kind: for example `model`.
            expected: global shape of every parameter by name.

        Raises:
            CheckpointError: a tensor is missing, is not known, or has another shape; names up to three.
        """
        stored = {name: self.shape(kind, name) for name in self.names(kind)}
        check_shapes(stored, expected, f"{self.folder} ({kind})")

    def read(self, kind: str, name: str) -> torch.Tensor:
        """A whole tensor on the CPU, in its stored dtype."""
        shape = self.shape(kind, name)
        return self.read_box(kind, name, (0,) * len(shape), shape)

    def read_box(self, kind: str, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """A part of a tensor; reads from disk only what lies in it.

        Args:
            kind: for example `ema`.
            name: global parameter name.
            offset: first index in each dim (d numbers).
            size: extent in each dim (d numbers), the shape of the result.

        Raises:
            CheckpointError: no such tensor, the box does not fit, or a file is not what the index says.
        """
        record = self._record(kind, name)
        fits = len(offset) == len(size) == len(record.shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(offset, size, record.shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{kind}/{name} has shape {record.shape} in {self.folder}; a part at {tuple(offset)} of size "
                f"{tuple(size)} does not fit, so it belongs to another network"
            )
        result = torch.empty(tuple(size), dtype=DTYPES[record.dtype])
        for piece in record.pieces:
            common = intersect(offset, size, piece.offset, piece.size)
            if common is not None:
                target = result[slices(*common, origin=offset)]
                target.copy_(self._read_piece(piece, record, *common))
        return result

    def read_range(
        self, kind: str, name: str, offset: Sequence[int], size: Sequence[int], start: int, stop: int
    ) -> torch.Tensor:
        """The flat values [start, stop) of a box, as ZeRO holds a fragment of a tensor-parallel slice.

        Args:
            kind: for example `optimizer.exp_avg`.
            name: global parameter name.
            offset: where the box (the slice) lies in the whole tensor.
            size: shape of the box.
            start: first flat row-major index inside the box.
            stop: one past the last one.

        Returns:
            (stop - start,) in the stored dtype; the counterpart of `pieces_of_range`.
        """
        result = torch.empty(stop - start, dtype=self.dtype(kind, name))
        for box in boxes_of_range(size, start, stop):
            where = [base + inner for base, inner in zip(offset, box.offset, strict=True)]
            first = box.start - start
            values = self.read_box(kind, name, where, box.size)
            result[first : first + math.prod(box.size)] = values.reshape(-1)
        return result

    def _record(self, kind: str, name: str) -> TensorRecord:
        try:
            return self.index.tensors[f"{kind}/{name}"]
        except KeyError:
            raise CheckpointError(f"{self.folder} holds no {kind}/{name}; it belongs to another network") from None

    def _read_piece(
        self, piece: PieceRecord, record: TensorRecord, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> torch.Tensor:
        path = self.folder / piece.file
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(path, framework="pt", device="cpu")
            file = self._files[piece.file]
            if not size:
                values = file.get_tensor(piece.key)
            else:
                part = file.get_slice(piece.key)
                if tuple(part.get_shape()) != piece.size:
                    raise CheckpointError(f"{path}: {piece.key} does not have the shape {piece.size} of the index")
                values = part[slices(offset, size, origin=piece.offset)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); choose another checkpoint") from None
        if values.dtype != DTYPES[record.dtype] or tuple(values.shape) != size:
            raise CheckpointError(f"{path}: {piece.key} is not the {record.dtype} tensor that the index states")
        return values


def check_shapes(stored: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], source: str) -> None:
    """Compares names and shapes.

    Raises:
        CheckpointError: one line with up to three names of each fault.
    """
    faults = []
    if missing := [name for name in expected if name not in stored]:
        faults.append(f"lacks {_some(missing)}")
    if unknown := [name for name in stored if name not in expected]:
        faults.append(f"also holds {_some(unknown)}")
    different = [
        f"{name} {tuple(stored[name])} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name]) != tuple(shape)
    ]
    if different:
        faults.append(f"has {_some(different)}")
    if faults:
        raise CheckpointError(f"{source} belongs to another network: it {', '.join(faults)}")


def _some(items: Iterable[str]) -> str:
    every = list(items)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
