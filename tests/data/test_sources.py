"""From settings to an open data set, and the checks against the network's settings."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from megadiff.config.schema import Config
from megadiff.data.sources import open_dataset
from megadiff.errors import ConfigError, DataError


def make_config(data: dict, **model: int) -> Config:
    defaults = {"input_size": 8, "in_channels": 3, "num_classes": 2}
    return Config.model_validate({"data": data, "model": defaults | model})


def test_every_source_opens_by_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name / "x.png")
    (tmp_path / "latents").mkdir()
    tensors = {"latents": torch.zeros(1, 3, 8, 8), "labels": torch.zeros(1).long()}
    save_file(tensors, tmp_path / "latents" / "x.safetensors")
    settings = [
        {"name": "emoji", "classes": ("heart", "time")},
        {"name": "image_folder", "path": str(tmp_path / "images")},
        {"name": "latents", "path": str(tmp_path / "latents")},
        {"name": "ids", "num_samples": 5},
    ]
    for data in settings:
        dataset = open_dataset(make_config(data))
        image, label = dataset.load(0)
        assert image.shape == (3, 8, 8) and label in (0, 1) and len(dataset.class_names) == 2


def test_another_number_of_classes_names_both_and_the_remedy() -> None:
    config = make_config({"name": "emoji", "classes": ("heart", "time", "geometric")})
    with pytest.raises(ConfigError, match=r"3 classes but model.num_classes = 2; set model.num_classes = 3"):
        open_dataset(config)


@pytest.mark.parametrize("name", ["fashion_mnist", "image_folder", "latents"])
def test_a_missing_or_wrong_path_says_what_belongs_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data.name = {name} needs data.path"):
        open_dataset(make_config({"name": name}))
    with pytest.raises(DataError, match=r"is not a folder"):
        open_dataset(make_config({"name": name, "path": str(tmp_path / "none")}))


@pytest.mark.parametrize("name", ["emoji", "image_folder"])
def test_colour_pictures_are_refused_for_a_network_of_four_channels(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"data.name = {name} .*in_channels = 4.*latents"):
        open_dataset(make_config({"name": name, "path": str(tmp_path)}, in_channels=4))


def test_latents_are_not_mirrored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.flip"):
        open_dataset(make_config({"name": "latents", "path": str(tmp_path), "flip": True}))


@pytest.mark.parametrize("name", ["latents", "ids"])
def test_class_names_are_refused_where_classes_are_numbers(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"remove data.classes"):
        open_dataset(make_config({"name": name, "path": str(tmp_path), "classes": ("a", "b")}))
