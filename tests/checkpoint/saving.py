"""Whole saves by pretended ranks, for the tests of this folder."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megadiff.checkpoint import (
    CHECKPOINTS,
    Piece,
    begin_save,
    build_index,
    checkpoint_folder,
    pieces_of_range,
    prune,
    publish,
    write_rank_file,
)
from megadiff.config.schema import Config

Tensors = Mapping[str, torch.Tensor]


def even_split(rank: int, ranks: int) -> Callable[[str, str, torch.Tensor], list[Piece]]:
    """ZeRO-like ownership: rank r owns the r-th of `ranks` flat ranges of every tensor."""

    def pieces(kind: str, name: str, tensor: torch.Tensor) -> list[Piece]:
        start, stop = (tensor.numel() * edge // ranks for edge in (rank, rank + 1))
        shape = tuple(tensor.shape)
        values = tensor.reshape(-1)[start:stop]
        return pieces_of_range(kind, name, shape, (0,) * len(shape), shape, start, values)

    return pieces


def save(
    root: Path,
    step: int,
    kinds: Mapping[str, Tensors],
    config: Config | None = None,
    ranks: int = 2,
    keep_last: int = 0,
    protect: tuple[Path, ...] = (),
    fail: bool = False,
) -> Path:
    """What an engine does on each of `ranks` ranks; `fail` loses a rank's file before `publish`."""
    temporary = begin_save(root, step)
    manifests = []
    for rank in range(ranks):
        own = even_split(rank, ranks)
        pieces = [p for kind, group in kinds.items() for name, t in group.items() for p in own(kind, name, t)]
        manifests.append(write_rank_file(temporary, rank, pieces))
    if fail:
        (temporary / manifests[-1].file).unlink()
    counters = {"step": step, "samples": 64 * step, "ema_updates": step}
    index = build_index(step, counters, (config or Config()).model_dump(mode="json"), manifests)
    final = checkpoint_folder(root, step)
    publish(temporary, final, index)
    prune(root, keep_last, protect)
    return final


def save_run(run: Path, step: int, kinds: Mapping[str, Tensors], config: Config) -> Path:
    """A run folder with one checkpoint; returns the run folder."""
    save(run / CHECKPOINTS, step, kinds, config)
    return run


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of all ranks and of sizes that do not divide by two."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 7), "a.bias": (7,), "b.weight": (3, 2, 3, 3), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
