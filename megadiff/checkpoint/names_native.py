"""Our own parameter names in plain safetensors; the network's settings travel in the header."""

from typing import Any

from pydantic import ValidationError

from megadiff.checkpoint.names import Convention, NameRow, Origin, parameter_shapes
from megadiff.config.schema import ModelConfig
from megadiff.errors import CheckpointError


def _rows(model: ModelConfig) -> list[NameRow]:
    return [NameRow(name, (name,)) for name in parameter_shapes(model)]


def _objection(model: ModelConfig) -> str | None:
    return None


def _config_json(model: ModelConfig) -> dict[str, Any] | None:
    return None


def _read_model(origin: Origin) -> ModelConfig:
    if "model" not in origin.metadata and origin.expected is not None:
        return origin.expected
    try:
        return ModelConfig.model_validate_json(origin.metadata["model"])
    except KeyError:
        raise CheckpointError(
            "the header of these weights does not say which network they belong to; give its config with --config"
        ) from None
    except ValidationError as error:
        raise CheckpointError(
            f"the header of these weights names no usable network ({error.errors()[0]['msg']}); "
            "give its config with --config"
        ) from None


NATIVE = Convention("native", "model", _rows, _objection, _config_json, _read_model)
