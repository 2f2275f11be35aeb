"""The table of feature spaces: what a user names to an open network."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from megadiff.errors import ConfigError
from megadiff.evaluation.embedded import open_embedded
from megadiff.evaluation.features import Features, FeatureSpace, fingerprint_of
from megadiff.evaluation.pretrained import open_folder
from megadiff.models.inception import CONTENT, InceptionV3, load_inception

EMBEDDED, INCEPTION = "embedded", "inception"


class SettingNames(NamedTuple):
    """What a user calls the settings of a feature space, for messages."""

    features: str
    weights: str


FLAGS = SettingNames("--features", "--weights")


class _Inception(nn.Module):
    def __init__(self, network: InceptionV3) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Features:
        return Features(*self.network(images))


def open_space(name: str, weights: Path | None, cache: Path, settings: SettingNames = FLAGS) -> FeatureSpace:
    """The feature space that two settings name.

    Args:
        name: `embedded`, `inception`, or a local folder of transformers.
        weights: of inception.
        cache: where the embedded classifier is kept.
        settings: where the name and the weights were given.

    Raises:
        ConfigError: no such space, or weights that it lacks or does not read.
        CheckpointError: weights that are missing, damaged or of another network.
        DataError: see `open_embedded`.
    """
    if name == INCEPTION:
        if weights is None:
            raise ConfigError(f"{settings.features} inception needs {settings.weights} FILE, {CONTENT}")
        return _open_inception(weights, settings.weights)
    if weights is not None:
        raise ConfigError(f"{settings.weights} belongs to {settings.features} inception; leave it out for {name}")
    if name == EMBEDDED:
        return open_embedded(cache, settings.features)
    if not Path(name).is_dir():
        raise ConfigError(
            f"{settings.features} = {name} is no feature space; use embedded, inception, or a local folder"
        )
    return open_folder(Path(name))


def _open_inception(weights: Path, setting: str) -> FeatureSpace:
    network = _Inception(load_inception(weights, setting))
    return FeatureSpace(f"InceptionV3 of {weights.name}", network, fingerprint_of(network, INCEPTION), is_fid=True)
