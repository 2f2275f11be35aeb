"""GroupNorm-SiLU in shapes that reach every way in which csrc/cuda/group_norm_silu_tiling.cu cuts a tensor into tiles.

One pass keeps a tile of whole groups in shared memory if it has at most 32 KiB, or 160 KiB where there are 108 of them.
"""

import pytest
import torch

from tests.ops.cases import KERNEL_DTYPES
from tests.ops.test_group_norm_silu import case, compare

Namespace = torch._ops._OpNamespace
TILES = {
    "one pass, several groups in a strip": ((2, 96, 8, 8), 8),
    "one pass, a ragged last strip": ((1, 320, 6, 6), 32),
    "one pass, a strip of all channels": ((2, 66, 4, 4), 2),
    "two passes, parts of channels": ((1, 16, 96, 96), 4),
    "two passes, whole channels": ((2, 40, 20, 20), 1),
    "two passes, no packs": ((1, 20, 45, 47), 2),
    "two passes, parts of a group": ((1, 2056, 3, 4), 1),
    "two passes, parts of a group without packs": ((1, 2100, 3, 3), 1),
    "two passes, groups that are no packs and too wide for threads": ((1, 2056, 4, 4), 8),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("name", TILES)
def test_tiles(operators: Namespace, name: str, dtype: torch.dtype, channels_last: bool) -> None:
    shape, groups = TILES[name]
    compare(operators, case(shape, dtype, torch.float32, channels_last=channels_last), groups)


@pytest.mark.parametrize(
    ("shape", "groups", "channels_last"), [((4, 32, 112, 112), 32, False), ((4, 216, 40, 40), 27, True)], ids=str
)
def test_tiles_that_fill_the_shared_memory(
    operators: Namespace, shape: tuple[int, ...], groups: int, channels_last: bool
) -> None:
    compare(operators, case(shape, torch.float32, torch.float32, channels_last=channels_last), groups)


@pytest.mark.parametrize("shape", [(2, 8, 9, 7), (2, 8, 8, 8)], ids=str)
def test_memory_that_is_not_aligned(operators: Namespace, shape: tuple[int, ...]) -> None:
    inputs = case(shape, torch.float32, torch.float32)
    assert inputs[0] is not None
    inputs[0] = torch.cat([torch.zeros(1), inputs[0].flatten()])[1:].view(shape)
    compare(operators, inputs, 2)
