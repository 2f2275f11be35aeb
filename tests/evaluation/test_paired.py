"""PSNR and SSIM of pairs against their formulas, LPIPS against torchmetrics' on a network written out."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional.image import lpips as published

from megadiff.errors import CheckpointError, DataError
from megadiff.evaluation.extract import Work
from megadiff.evaluation.images import open_files
from megadiff.evaluation.lpips import load_lpips
from megadiff.evaluation.paired import compare_pairs, measure_fidelity
from tests.evaluation.sets import noise, save_set, save_vgg16

WORK = Work(batch_size=2, device=torch.device("cpu"), threads=1)


@pytest.fixture(scope="module")
def vgg16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vgg16(tmp_path_factory.mktemp("vgg16") / "vgg16.pth")


def test_psnr_and_ssim_are_their_formulas() -> None:
    """torchmetrics takes the logarithm of 10 in float32."""
    images, others = noise(3).double(), noise(3, seed=1).double()
    found = compare_pairs(images, others)
    for psnr, first, second in zip(found["psnr"], images, others, strict=True):
        assert float(psnr) == pytest.approx(10 * math.log10(4 / float((first - second).square().mean())), rel=1e-7)
    shifted = compare_pairs(torch.full((1, 3, 16, 16), 0.2), torch.full((1, 3, 16, 16), 0.6))
    # Of flat pictures only the means differ: the first factor of SSIM, with c1 = (0.01 range)^2.
    expected = (2 * 0.2 * 0.6 + 4e-4) / (0.2**2 + 0.6**2 + 4e-4)
    assert float(shifted["ssim"]) == pytest.approx(expected, rel=1e-6)


def test_the_same_pictures_are_infinitely_near(tmp_path: Path) -> None:
    files = open_files(save_set(tmp_path, noise(3)), None, 1)
    found = measure_fidelity(files, files, None, WORK)
    assert found.psnr == math.inf and found.ssim == pytest.approx(1.0) and found.lpips is None


def test_means_are_over_pairs_of_one_name(tmp_path: Path, vgg16: Path) -> None:
    lpips = load_lpips(vgg16, "--lpips")
    fake = open_files(save_set(tmp_path / "a", noise(5)), None, 1)
    reference = open_files(save_set(tmp_path / "b", noise(5, seed=1)), None, 1)
    found = measure_fidelity(fake, reference, lpips, WORK)
    pixels = [torch.stack([part.load(i) for i in range(5)]).float() / 127.5 - 1 for part in (fake, reference)]
    expected = compare_pairs(pixels[0], pixels[1], lpips)
    assert (found.psnr, found.ssim) == pytest.approx((float(expected["psnr"].mean()), float(expected["ssim"].mean())))
    assert found.lpips == pytest.approx(float(expected["lpips"].mean()), rel=1e-5)


class PlainVgg16(nn.Module):
    """The five maps, from a plain sequence of torch's layers."""

    def __init__(self, pretrained: bool, requires_grad: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512):
            layers += [nn.MaxPool2d(2)] if width == 0 else [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width or channels
        self.features = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = []
        for layer in self.features:
            if isinstance(layer, nn.MaxPool2d):
                maps.append(images)
            images = layer(images)
        return [*maps, images]


def test_lpips_is_that_of_torchmetrics(monkeypatch: pytest.MonkeyPatch, vgg16: Path) -> None:
    """Its scaling, heads and averages, on the maps of a network of the same weights."""
    monkeypatch.setattr(published, "Vgg16", PlainVgg16)
    oracle = published._LPIPS(net="vgg")
    weights = {name: value for name, value in torch.load(vgg16, weights_only=True).items() if "features" in name}
    oracle.net.load_state_dict(weights)
    images, others = noise(2, 20), noise(2, 20, seed=1)
    found = load_lpips(vgg16, "--lpips")(images, others)
    torch.testing.assert_close(found, oracle(images, others).flatten(), rtol=1e-4, atol=1e-6)
    assert float(found.min()) > 0 and float(load_lpips(vgg16, "--lpips")(images, images).abs().max()) == 0


def test_other_weights_are_refused(tmp_path: Path, vgg16: Path) -> None:
    values = torch.load(vgg16, weights_only=True)
    torch.save({name: value for name, value in values.items() if name != "features.17.weight"}, tmp_path / "vgg19.pth")
    with pytest.raises(CheckpointError, match=r"no tensor features\.17\.weight; give torchvision's vgg16 weights"):
        load_lpips(tmp_path / "vgg19.pth", "--lpips")
    with pytest.raises(CheckpointError, match=r"--lpips = .*absent\.pth is not a file"):
        load_lpips(tmp_path / "absent.pth", "--lpips")


def test_sets_that_do_not_pair_are_refused(tmp_path: Path) -> None:
    fake = open_files(save_set(tmp_path / "fake", noise(3)), None, 1)
    few = open_files(save_set(tmp_path / "few", noise(2)), None, 1)
    for first, second in ((fake, few), (few, fake)):
        with pytest.raises(DataError, match=r"few has no 00002\.png; --reference needs the same file names"):
            measure_fidelity(first, second, None, WORK)
    large = open_files(save_set(tmp_path / "large", noise(3, 32)), None, 1)
    with pytest.raises(DataError, match=r"fake has pictures of 16 x 16 pixels and .*large of 32 x 32"):
        measure_fidelity(fake, large, None, WORK)
    small = open_files(save_set(tmp_path / "small", noise(3, 8)), None, 1)
    with pytest.raises(DataError, match="8 x 8 pixels are too small for --reference; it needs 11 a side"):
        measure_fidelity(small, small, None, WORK)
