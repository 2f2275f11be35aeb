"""Features of a set of pictures, computed in batches once and read from a cache later."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megadiff.data.dataset import hash_parts, to_signed_unit
from megadiff.evaluation.cache import read_tensors, write_tensors
from megadiff.evaluation.features import Features, FeatureSpace
from megadiff.evaluation.images import Images, batches


@dataclass(frozen=True)
class Work:
    """How features are computed; none of it is part of what they are.

    Attributes:
        batch_size: pictures at once.
        device: where the network runs.
        threads: pictures decoded at once.
    """

    batch_size: int
    device: torch.device
    threads: int


def extract(images: Images, space: FeatureSpace, work: Work, cache: Path) -> Features:
    """(N, D) float32 features of all pictures in order, on the CPU, with logits where the space has classes.

    The file in the cache is named after the fingerprints of both: another picture or another network is another file.

    Raises:
        DataError: a picture cannot be read, or the cache is damaged or cannot be written.
    """
    file = cache / f"{hash_parts((images.fingerprint, space.fingerprint))[:32]}.safetensors"
    stored = read_tensors(file)
    if stored is None:
        stored = _compute(images, space, work)
        write_tensors(stored, file, {"images": images.title, "features": space.name})
    return Features(stored["values"], stored.get("logits"))


@torch.no_grad()
def _compute(images: Images, space: FeatureSpace, work: Work) -> dict[str, Tensor]:
    network = space.network.to(work.device)
    found: dict[str, list[Tensor]] = {"values": [], "logits": []}
    with tqdm(total=len(images), unit="image", desc=images.title, disable=not sys.stderr.isatty()) as bar:
        for pixels in batches(images, work.batch_size, work.threads):
            part = network(to_signed_unit(pixels).to(work.device))
            for name, tensor in zip(("values", "logits"), part, strict=True):
                found[name] += [] if tensor is None else [tensor.float().cpu()]
            bar.update(len(pixels))
    return {name: torch.cat(tensors) for name, tensors in found.items() if tensors}
