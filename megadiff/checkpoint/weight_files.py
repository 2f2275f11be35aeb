"""Safetensors weights of another project, one file or shards with an index, opened lazily. No pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadiff.errors import CheckpointError

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"


class WeightFiles:
    """All tensors of a folder or file by name.

    Attributes:
        shapes: shape of every tensor.
        metadata: text pairs of the header of the first file.
        config: content of config.json beside the weights, or None.
    """

    def __init__(self, path: Path) -> None:
        """Opens the headers.

        Args:
            path: a folder with one safetensors file or one index of several, or such a file.

        Raises:
            CheckpointError: nothing usable there; the message names the file.
        """
        self.path = path
        folder = path if path.is_dir() else path.parent
        self._open = {file: _open_file(file) for file in _files(path)}
        self._owner = {name: handle for handle in self._open.values() for name in handle.keys()}  # noqa: SIM118
        self.shapes = {name: tuple(h.get_slice(name).get_shape()) for name, h in self._owner.items()}
        self.metadata: Mapping[str, str] = next(iter(self._open.values())).metadata() or {}
        self.config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else None

    def read(self, name: str) -> Tensor:
        """A tensor in its stored dtype."""
        try:
            tensor: Tensor = self._owner[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from None
        return tensor


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return _indexed(path) if path.name.endswith(_INDEX_SUFFIX) else [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give a folder with safetensors files, or one such file")
    indexes = sorted(path.glob(f"*{_INDEX_SUFFIX}"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if len(indexes) > 1 or len(files) != 1:
        raise CheckpointError(
            f"{path} holds {len(files)} safetensors files and {len(indexes)} indexes of such files; give the "
            "one file or index to import"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; it is not the index of safetensors files")
    for name in weight_map.values():
        # A name with a folder in it could point anywhere.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(_SUFFIX):
            raise CheckpointError(f"{index} names {name!r} as a file of weights; only files beside it are read")
    return [index.with_name(name) for name in sorted(set(weight_map.values()))]


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is no readable safetensors file ({error}); pickled weights (.pt, .bin) are not read, "
            "convert them with safetensors first"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content
