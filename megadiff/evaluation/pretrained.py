"""Feature spaces of local folders in the format of transformers: any vision model that pools its output, and CLIP."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.errors import CheckpointError
from megadiff.evaluation.features import Features, FeatureSpace, fingerprint_of
from megadiff.sampling.images import to_uint8


class PooledNetwork(nn.Module):
    """(B, 3, H, W) in [-1, 1] -> (B, D), prepared as the folder says and pooled as the model does."""

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__()
        self.model, self.processor = model, processor
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Features:
        output = self.model(pixel_values=_prepare(images, self.processor))
        return Features(output.pooler_output.flatten(1), None)


class ClipNetwork(nn.Module):
    """Pictures and texts in the common space of CLIP (Radford et al. 2021), not normalised."""

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.processor, self.tokenizer = processor, tokenizer
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Features:
        """(B, 3, H, W) in [-1, 1] -> (B, D)."""
        output = self.model.vision_model(pixel_values=_prepare(images, self.processor))
        return Features(self.model.visual_projection(output.pooler_output), None)

    def texts(self, captions: Sequence[str]) -> Tensor:
        """(B, D); what a text has beyond the model's length is cut off, as usual."""
        length = self.model.config.text_config.max_position_embeddings
        settings = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
        tokens = self.tokenizer(list(captions), **settings).to(next(self.parameters()).device)
        pooled: Tensor = self.model.text_projection(self.model.text_model(**tokens).pooler_output)
        return pooled


def open_folder(folder: Path) -> FeatureSpace:
    """A vision model, such as DINOv2, or the vision part of CLIP, in a local folder of transformers.

    Raises:
        CheckpointError: no such folder, weights are missing, or the model does not read pictures or pool its output.
    """
    if model_type(folder) == "clip":
        return open_clip(folder)
    from transformers import AutoImageProcessor, AutoModel

    network = PooledNetwork(_load(AutoModel, folder), _open(AutoImageProcessor, folder))
    try:
        network(torch.zeros(1, 3, 32, 32))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder} gives no pooled output for a picture ({line}); use a vision model") from error
    return _space(network, folder)


def open_clip(folder: Path) -> FeatureSpace:
    """CLIP in a local folder of transformers; the network is a `ClipNetwork`.

    Raises:
        CheckpointError: no such folder, another model, or weights or the tokenizer are missing.
    """
    if (found := model_type(folder)) != "clip":
        raise CheckpointError(f"{folder} holds a model of type {found}; give a folder of transformers' CLIPModel")
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    model, tokenizer = _load(CLIPModel, folder), _open(AutoTokenizer, folder)
    return _space(ClipNetwork(model, _open(AutoImageProcessor, folder), tokenizer), folder)


@torch.no_grad()
def clip_score(images: Tensor, texts: Tensor) -> float:
    """100 max(cos, 0) of pictures and their texts, averaged (Hessel et al. 2021, section 3, with 100 in place of 2.5).

    Args:
        images: (N, D).
        texts: (N, D).
    """
    cosines = functional.cosine_similarity(images.double(), texts.double())
    return float(100 * cosines.clamp(min=0).mean())


def model_type(folder: Path) -> str:
    """The kind of model that a folder of transformers says it holds, such as `clip` or `dinov2`.

    Raises:
        CheckpointError: it says none.
    """
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has no config.json with a model_type; give a local folder that transformers has saved"
        ) from error


def _space(network: PooledNetwork | ClipNetwork, folder: Path) -> FeatureSpace:
    kind, preparation = network.model.config.model_type, network.processor.to_json_string()
    return FeatureSpace(f"{kind} of {folder}", network, fingerprint_of(network, kind, preparation))


def _prepare(images: Tensor, processor: Any) -> Tensor:
    """What the model reads of pictures, made of their 8-bit values."""
    pixels = list(to_uint8(images).cpu().numpy())
    prepared = processor(images=pixels, return_tensors="pt", input_data_format="channels_first")
    values: Tensor = prepared["pixel_values"]
    return values.to(images.device)


def _load(kind: Any, folder: Path) -> Any:
    """The model, all of whose weights are in the folder: transformers would fill up with random ones."""
    model, report = _open(kind, folder, output_loading_info=True)
    lacking = [*sorted(report["missing_keys"]), *sorted(map(str, report["mismatched_keys"]))]
    if lacking:
        raise CheckpointError(
            f"{folder} lacks {len(lacking)} weights of its {type(model).__name__}, such as {lacking[0]}, which would "
            "be random; give a folder with the whole model"
        )
    return model


def _open(kind: Any, folder: Path, **settings: bool) -> Any:
    try:
        with _quiet():
            return kind.from_pretrained(str(folder), local_files_only=True, **settings)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot open {folder} with transformers' {kind.__name__}: {line}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes and bars of transformers: what is wrong is said in one line."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
