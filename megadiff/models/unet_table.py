"""The layers of a UNet as a table: names, widths and sizes, from which network, costs and name maps are read.

A layer is called `path.level.index.part`: path is down, mid or up, level counts from the finest resolution, and the
parts of a unit are `resnet`, then `attn`, or `enter`, `blocks.K` and `leave` of a transformer. A level ends in
`path.level.sample`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megadiff.config.schema import ModelConfig
from megadiff.models.sizes import output_channels

Kind = Literal["embed", "resnet", "attn", "enter", "block", "leave", "down", "up", "head"]


@dataclass(frozen=True)
class UNetLayer:
    """One layer of the chain.

    Attributes:
        name: of the layer in the chain.
        kind: which module it is.
        in_channels, out_channels: of the feature map, without a skip.
        side: height and width of the feature map that enters.
        skip_from: the layer whose output joins here, or None.
        skip_channels: its width.
    """

    name: str
    kind: Kind
    in_channels: int
    out_channels: int
    side: int
    skip_from: str | None = None
    skip_channels: int = 0

    @property
    def resnet_channels(self) -> int:
        """Width of what a ResNet block with a concatenated skip computes on."""
        return self.in_channels + self.skip_channels


def unet_table(model: ModelConfig) -> list[UNetLayer]:
    """All layers in the order of the chain."""
    return list(_layers(model))


def has_attention(model: ModelConfig) -> bool:
    """True if any layer attends."""
    return any(model.transformer_layers_per_block) or model.mid_block_transformer_layers > 0


def time_channels(model: ModelConfig) -> int:
    """Width of the embedding of time and condition."""
    return 4 * model.block_out_channels[0]


def _layers(model: ModelConfig) -> Iterator[UNetLayer]:
    widths, size = model.block_out_channels, model.input_size
    skips: list[UNetLayer] = []
    yield (layer := UNetLayer("embed", "embed", model.in_channels, widths[0], size))
    skips.append(layer)
    for level, width in enumerate(widths):
        for index in range(model.layers_per_block):
            unit = list(_unit(model, f"down.{level}.{index}", level, layer.out_channels, width))
            yield from unit
            skips.append(layer := unit[-1])
        if level + 1 < len(widths):
            yield (layer := UNetLayer(f"down.{level}.sample", "down", width, width, size >> level))
            skips.append(layer)
    last = len(widths) - 1
    yield from _unit(model, "mid.0.0", last, widths[-1], widths[-1], model.mid_block_transformer_layers)
    yield UNetLayer("mid.0.1.resnet", "resnet", widths[-1], widths[-1], size >> last)
    current = widths[-1]
    for level, width in reversed(list(enumerate(widths))):
        for index in range(model.layers_per_block + 1):
            yield from _unit(model, f"up.{level}.{index}", level, current, width, skip=skips.pop())
            current = width
        if level > 0:
            yield UNetLayer(f"up.{level}.sample", "up", width, width, size >> level)
    yield UNetLayer("head", "head", widths[0], output_channels(model), size)


def _unit(
    model: ModelConfig,
    name: str,
    level: int,
    in_channels: int,
    width: int,
    depth: int | None = None,
    skip: UNetLayer | None = None,
) -> Iterator[UNetLayer]:
    """A ResNet block and what attends after it."""
    side = model.input_size >> level
    depth = model.transformer_layers_per_block[level] if depth is None else depth
    source, skip_channels = (skip.name, skip.out_channels) if skip else (None, 0)
    yield UNetLayer(f"{name}.resnet", "resnet", in_channels, width, side, source, skip_channels)
    if depth and model.condition != "text":
        yield UNetLayer(f"{name}.attn", "attn", width, width, side)
    elif depth:
        yield UNetLayer(f"{name}.enter", "enter", width, width, side)
        for block in range(depth):
            yield UNetLayer(f"{name}.blocks.{block}", "block", width, width, side)
        yield UNetLayer(f"{name}.leave", "leave", width, width, side)
