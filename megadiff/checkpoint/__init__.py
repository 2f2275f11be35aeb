"""The layout-independent store of training state. Knows no process groups: callers pass ranks as numbers."""

from megadiff.checkpoint.boxes import Box, boxes_of_range, intersect
from megadiff.checkpoint.folders import (
    CHECKPOINTS,
    checkpoint_folder,
    find_checkpoint,
    has_checkpoint,
    list_complete,
    step_of,
)
from megadiff.checkpoint.index import Index, RankManifest, build_index
from megadiff.checkpoint.reader import CheckpointReader, check_shapes
from megadiff.checkpoint.retention import prune
from megadiff.checkpoint.writer import (
    Piece,
    begin_save,
    pieces_of_range,
    publish,
    whole_piece,
    write_rank_file,
)

__all__ = [
    "CHECKPOINTS",
    "Box",
    "CheckpointReader",
    "Index",
    "Piece",
    "RankManifest",
    "begin_save",
    "boxes_of_range",
    "build_index",
    "check_shapes",
    "checkpoint_folder",
    "find_checkpoint",
    "has_checkpoint",
    "intersect",
    "list_complete",
    "pieces_of_range",
    "prune",
    "publish",
    "step_of",
    "whole_piece",
    "write_rank_file",
]
