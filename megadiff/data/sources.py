"""The table of data sources: the settings of a run to an open data set."""

from collections.abc import Callable

from megadiff.config.schema import Config
from megadiff.data.balanced import BalancedDataset
from megadiff.data.dataset import Dataset, require_folder
from megadiff.data.emoji import open_emoji
from megadiff.data.fashion_mnist import FashionMnist
from megadiff.data.ids import IdDataset
from megadiff.data.image_folder import ImageFolder
from megadiff.data.latents import LatentFolder
from megadiff.data.tensor_files import text_shape
from megadiff.errors import ConfigError
from megadiff.models.sizes import text_size


def open_dataset(config: Config) -> Dataset:
    """Open the data set of a run and check it against the network's settings.

    Raises:
        DataError: the data set is missing, damaged or empty.
        ConfigError: number of classes, number of channels or flipping do not fit the data set.
    """
    dataset = _OPENERS[config.data.name](config)
    check_num_classes(dataset, config)
    return BalancedDataset(dataset) if config.data.balanced else dataset


def check_num_classes(dataset: Dataset, config: Config) -> None:
    """Raise ConfigError unless the data set has model.num_classes classes, if the network reads them."""
    if config.model.condition != "class":
        return
    found, expected = len(dataset.class_names), config.model.num_classes
    if found != expected:
        raise ConfigError(
            f"data.name = {config.data.name} gives {found} classes but model.num_classes = {expected}; "
            f"set model.num_classes = {found} or choose {expected} classes with data.classes"
        )


def _open_emoji(config: Config) -> Dataset:
    _require_rgb(config)
    return open_emoji(config.model.input_size, config.data.grouping, config.data.classes)


def _open_fashion_mnist(config: Config) -> Dataset:
    content = "the folder of train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz"
    folder = require_folder(config.data.path, "fashion_mnist", content)
    return FashionMnist(folder, config.model.input_size, config.model.in_channels, config.data.classes)


def _open_image_folder(config: Config) -> Dataset:
    _require_rgb(config)
    folder = require_folder(config.data.path, "image_folder", "a folder of class folders with images")
    return ImageFolder(folder, config.model.input_size, config.data.classes)


def _open_latents(config: Config) -> Dataset:
    folder = require_folder(config.data.path, "latents", "a folder of safetensors files")
    _refuse_class_names(config)
    if config.data.flip:
        raise ConfigError(
            "data.flip mirrors pixels but data.name = latents holds encoded ones; set data.flip to false and "
            "store mirrored pictures too"
        )
    model = config.model
    return LatentFolder(
        folder, model.in_channels, model.input_size, model.num_classes, model.condition, text_shape(model)
    )


def _open_ids(config: Config) -> Dataset:
    _refuse_class_names(config)
    model = config.model
    classes = model.num_classes
    return IdDataset(config.data.num_samples, classes, model.in_channels, model.input_size, text_size(model))


def _require_rgb(config: Config) -> None:
    if config.model.in_channels != 3:
        raise ConfigError(
            f"data.name = {config.data.name} gives pictures of 3 channels but model.in_channels = "
            f"{config.model.in_channels}; set model.in_channels = 3, or data.name = latents for latents"
        )


def _refuse_class_names(config: Config) -> None:
    if config.data.classes:
        raise ConfigError(f"data.name = {config.data.name} has numbers as classes; remove data.classes")


_OPENERS: dict[str, Callable[[Config], Dataset]] = {
    "emoji": _open_emoji,
    "fashion_mnist": _open_fashion_mnist,
    "image_folder": _open_image_folder,
    "latents": _open_latents,
    "ids": _open_ids,
}
