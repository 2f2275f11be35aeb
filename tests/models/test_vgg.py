"""VGG-19 up to relu3_3 against a plain sequence of torch's layers, and files that are not its weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megadiff.errors import CheckpointError, ConfigError
from megadiff.models.vae import load_decoder
from megadiff.models.vgg import VggFeatures, load_vgg
from tests.diffusion.weights import save_vae, save_vgg


def plain_vgg() -> nn.Sequential:
    """torchvision's `features` up to relu3_3, written out."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers)


def test_a11_features_are_relu3_3_of_imagenet_normalised_pictures(tmp_path: Path) -> None:
    network, plain = load_vgg(save_vgg(tmp_path / "vgg.pth")), plain_vgg()
    plain.load_state_dict({name.removeprefix("features."): value for name, value in network.state_dict().items()})
    images = torch.rand(2, 3, 12, 8) * 2 - 1
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalised = ((images + 1) / 2 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(network(images), plain(normalised))
    assert network(images).shape == (2, 256, 3, 2)
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_grey_pictures_are_three_equal_channels(tmp_path: Path) -> None:
    network, grey = load_vgg(save_vgg(tmp_path / "vgg.pth")), torch.rand(1, 1, 8, 8)
    torch.testing.assert_close(network(grey), network(grey.expand(1, 3, 8, 8)))


def test_safetensors_hold_the_same(tmp_path: Path) -> None:
    path = save_vgg(tmp_path / "vgg.pth")
    save_file(torch.load(path, weights_only=True), tmp_path / "vgg.safetensors")
    first, second = (load_vgg(tmp_path / name).state_dict() for name in ("vgg.pth", "vgg.safetensors"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_file_that_is_missing_cut_or_of_another_network_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = save_vgg(tmp_path / "vgg.pth")
    values = torch.load(whole, weights_only=True)
    (tmp_path / "cut.pth").write_bytes(whole.read_bytes()[:100_000])
    (tmp_path / "empty.pth").write_bytes(b"")
    save_file(values, tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:1000])
    torch.save({"layer1.weight": torch.zeros(2)}, tmp_path / "resnet.pth")
    torch.save({**values, "features.2.weight": torch.zeros(64)}, tmp_path / "vgg_bn.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save(VggFeatures(), tmp_path / "module.pth")
    expected = {
        "absent.pth": "is not a file",
        "cut.pth": "cannot read",
        "empty.pth": "cannot read",
        "cut.safetensors": "cannot read",
        "resnet.pth": "no tensor features.0.weight",
        "vgg_bn.pth": r"features.2.weight has shape \(64,\)",
        "list.pth": "no table of tensors",
        "module.pth": "cannot read",  # B26: it would run code
    }
    for name, message in expected.items():
        with pytest.raises(CheckpointError, match=message) as error:
            load_vgg(tmp_path / name)
        assert "\n" not in str(error.value) and name in str(error.value)


def test_a_decoder_undoes_scale_and_lets_gradients_through(tmp_path: Path) -> None:
    decoder = load_decoder(save_vae(tmp_path / "vae"), 3)
    latents = torch.randn(1, 3, 4, 4, requires_grad=True)
    pixels = decoder(latents)
    torch.testing.assert_close(pixels, decoder.vae.decode(latents / 0.5).sample)
    assert pixels.shape == (1, 3, 8, 8)
    pixels.sum().backward()
    assert latents.grad is not None and bool(latents.grad.any())


def test_a_folder_without_a_fitting_vae_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_decoder(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"decodes 3 channels, but model\.in_channels = 4"):
        load_decoder(save_vae(tmp_path / "vae"), 4)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be read") as error:
        load_decoder(tmp_path / "vae", 3)
    assert "\n" not in str(error.value)
