"""The naming convention of diffusers: one file a network class, chosen by the network or by config.json."""

from typing import Any

from megadiff.checkpoint.diffusers_class import DiffusersClass
from megadiff.checkpoint.names import Convention, NameRow, Origin
from megadiff.checkpoint.names_diffusers_dit import DIT
from megadiff.checkpoint.names_diffusers_unet import UNET, UNET_CONDITION
from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError

_CLASSES = (DIT, UNET, UNET_CONDITION)


def _class_of(model: ModelConfig) -> DiffusersClass:
    if model.name == "dit":
        return DIT
    return UNET_CONDITION if model.condition == "text" else UNET


def _rows(model: ModelConfig) -> list[NameRow]:
    return _class_of(model).rows(model)


def _objection(model: ModelConfig) -> str | None:
    return _class_of(model).objection(model)


def _config_json(model: ModelConfig) -> dict[str, Any]:
    target = _class_of(model)
    return {"_class_name": target.name, **target.config_json(model)}


def _read_model(origin: Origin) -> ModelConfig:
    if origin.config is None:
        raise CheckpointError("there is no config.json beside the weights; the model folders of diffusers have one")
    name = origin.config.get("_class_name")
    for source in _CLASSES:
        if source.name == name:
            return source.read_model(origin.config, origin)
    names = ", ".join(source.name for source in _CLASSES)
    raise CheckpointError(f"config.json has _class_name = {name!r}; the classes that can be imported are {names}")


DIFFUSERS = Convention("diffusers", "diffusion_pytorch_model", _rows, _objection, _config_json, _read_model)
