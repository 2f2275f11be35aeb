"""What a trained network can be asked for: its classes by name or number, or texts of a file."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadiff.config.schema import ModelConfig
from megadiff.data.tensor_files import read_texts, text_shape
from megadiff.diffusion.condition import Condition
from megadiff.errors import ConfigError, DataError


@dataclass(frozen=True)
class Conditions:
    """All conditions of a network that are known by name.

    Attributes:
        kind: `model.condition`: class, text or none.
        names: of classes or texts; a single one where there is no condition.
        values: what the network reads for each.
    """

    kind: str
    names: Sequence[str]
    values: Sequence[Condition]

    def number(self, text: str, asked: str) -> int:
        """The place of a class or text, by its name or else its number.

        Args:
            text: what the user wrote.
            asked: where, for the message.

        Raises:
            ConfigError: there is none.
        """
        if text in self.names:
            return self.names.index(text)
        if text.isdigit() and int(text) < len(self.names):
            return int(text)
        near = difflib.get_close_matches(text, self.names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(self.names[:20])}"
        raise ConfigError(f"{asked} {text} is not a {self.kind} of this network; {hint}")

    def take(self, values: dict[str, Any]) -> tuple[str, Condition]:
        """Name and condition of a request, whose key `class` or `text` is taken out.

        Raises:
            ConfigError: the key is missing, or names nothing.
        """
        if self.kind == "none":
            return self.names[0], self.values[0]
        if self.kind not in values:
            raise ConfigError(f'no {self.kind} is given; write for example "{self.kind}": "{self.names[0]}"')
        place = self.number(str(values.pop(self.kind)), self.kind)
        return self.names[place], self.values[place]


def conditions_of(model: ModelConfig, checkpoint: Path, texts: Path | None) -> Conditions:
    """The conditions of a checkpoint's network.

    Args:
        model: of the network.
        checkpoint: its folder, in a run folder that may know the names of classes.
        texts: a safetensors file of texts, for networks that read some.

    Raises:
        ConfigError: texts for a network that reads none, or none for one that does.
        DataError: a file that does not hold what it should.
    """
    if texts and model.condition != "text":
        raise ConfigError(
            f"--condition has no meaning for a network with model.condition = {model.condition}; remove it"
        )
    if model.condition == "class":
        return Conditions("class", class_names(checkpoint, model.num_classes), range(model.num_classes))
    if model.condition == "none":
        return Conditions("none", ["image"], [0])
    shape = text_shape(model)
    if texts is None or shape is None:
        raise ConfigError(
            "this network reads texts; give --condition FILE.safetensors with tokens (N, "
            f"{model.text_length}, {model.cross_attention_dim})"
            + (f" and pooled (N, {model.pooled_dim})" if model.pooled_dim else "")
        )
    values = list(read_texts(texts, shape))
    return Conditions("text", [f"text {number}" for number in range(len(values))], values)


def class_names(checkpoint: Path, num_classes: int) -> list[str]:
    """The names that the run folder of a checkpoint keeps, or the numbers as names."""
    path = checkpoint.parent.parent / "classes.json"
    if not path.is_file():
        return [str(label) for label in range(num_classes)]
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); delete it to choose classes by number") from None
    if not isinstance(names, list) or len(names) != num_classes:
        raise DataError(f"{path} does not hold {num_classes} class names; delete it to choose classes by number")
    return [str(name) for name in names]
