"""What is stated of each network class of diffusers that weights can go to and come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megadiff.checkpoint.names import NameRow, Origin
from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError


@dataclass(frozen=True)
class DiffusersClass:
    """A network class of diffusers.

    Attributes:
        name: `_class_name` in config.json.
        rows: the tensors there, in order, for a network.
        objection: why the class cannot hold a network without a change of its results, or None.
        config_json: content of config.json, besides the class name.
        read_model: the network that a config.json and what else is known of its weights describe.
    """

    name: str
    rows: Callable[[ModelConfig], list[NameRow]]
    objection: Callable[[ModelConfig], str | None]
    config_json: Callable[[ModelConfig], dict[str, Any]]
    read_model: Callable[[Mapping[str, Any], Origin], ModelConfig]


def learns_sigma(in_channels: int, out_channels: int | None) -> bool:
    """True if a network also holds the channels of a learnt variance; diffusers' None means as many as enter.

    Raises:
        CheckpointError: another number of channels leaves.
    """
    if out_channels in (None, in_channels):
        return False
    if out_channels == 2 * in_channels:
        return True
    raise CheckpointError(
        f"config.json has out_channels = {out_channels} for in_channels = {in_channels}; only the same or "
        "twice as many can be imported"
    )
