"""Features of a set of pictures, computed in batches once and read from a cache later."""

import sys
from collections.abc import Iterable, Iterator
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
        found = compute(_shown(images, work), space, work.device)
        stored = {name: tensor for name, tensor in found._asdict().items() if tensor is not None}
        write_tensors(stored, file, {"images": images.title, "features": space.name})
    return Features(stored["values"], stored.get("logits"))


@torch.no_grad()
def compute(parts: Iterable[Tensor], space: FeatureSpace, device: torch.device) -> Features:
    """Features as of `extract`, of pictures that come in parts (B, 3, H, W) uint8; nothing is kept of those."""
    network = space.network.to(device)
    values: list[Tensor] = []
    logits: list[Tensor] = []
    for pixels in parts:
        found = network(to_signed_unit(pixels).to(device))
        values.append(found.values.float().cpu())
        if found.logits is not None:
            logits.append(found.logits.float().cpu())
    return Features(torch.cat(values), torch.cat(logits) if logits else None)


def _shown(images: Images, work: Work) -> Iterator[Tensor]:
    """The pictures in batches, with a bar on a terminal."""
    with tqdm(total=len(images), unit="image", desc=images.title, disable=not sys.stderr.isatty()) as bar:
        for pixels in batches(images, work.batch_size, work.threads):
            yield pixels
            bar.update(len(pixels))
