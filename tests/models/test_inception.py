"""InceptionV3 of published FIDs: names and sizes of its file, its own pools, and files of other networks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from megadiff.errors import CheckpointError
from megadiff.models.inception import InceptionV3, load_inception, pool, resize
from tests.evaluation.sets import noise, save_inception


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inception(tmp_path_factory.mktemp("inception") / "inception.pth")


@pytest.fixture(scope="module")
def network(file: Path) -> InceptionV3:
    return load_inception(file, "--weights")


def test_an_average_leaves_the_padding_out_of_the_count() -> None:
    """Ones stay ones in the corners, where 5 of 9 places are padding."""
    ones = torch.ones(1, 2, 5, 5)
    assert torch.equal(pool(ones, "average"), ones)
    ramp = torch.arange(25.0).view(1, 1, 5, 5)
    assert float(pool(ramp, "average")[0, 0, 0, 0]) == pytest.approx((0 + 1 + 5 + 6) / 4)
    assert float(pool(ramp, "maximum")[0, 0, 0, 0]) == 6.0 and pool(ramp, "maximum").shape == ramp.shape
    assert pool(ramp, "halve").flatten().tolist() == [12.0, 14.0, 22.0, 24.0]


def test_pictures_are_resized_without_smoothing() -> None:
    """A checkerboard of 598 pixels becomes the mean of the four in the middle of each square, here the same grey."""
    pixels = torch.arange(598)
    board = ((pixels[:, None] + pixels) % 2 * 2.0 - 1).expand(1, 3, 598, 598)
    torch.testing.assert_close(resize(board), torch.zeros(1, 3, 299, 299))
    lines = (pixels % 4 == 0).float().expand(1, 3, 598, 598)
    assert resize(lines)[0, 0, 0, :4].tolist() == [0.5, 0.0, 0.5, 0.0], "smoothing would reach the second"
    assert torch.equal(resize(noise(1, 299)), noise(1, 299))


@torch.no_grad()
def test_sizes_of_features_and_logits(network: InceptionV3) -> None:
    found = network(noise(2, 40))
    assert found.features.shape == (2, 2048) and found.logits.shape == (2, 1008)
    assert found.features.isfinite().all() and float(found.features.min()) >= 0
    assert float((found.features[0] - found.features[1]).abs().max()) > 1e-3
    torch.testing.assert_close(found.logits, found.features @ network.fc.weight.T)
    assert not network.training and not any(parameter.requires_grad for parameter in network.parameters())


def test_names_and_number_of_weights_are_those_of_the_published_network(network: InceptionV3) -> None:
    """Of torchvision's without the auxiliary classifier (23,834,568) with 8 more classes of 2048 weights and a bias."""
    assert sum(parameter.numel() for parameter in network.parameters()) == 23_834_568 + 8 * 2049
    names = {name.removesuffix(".conv.weight") for name in network.state_dict() if name.endswith("conv.weight")}
    assert len(names) == 94
    assert names >= {"Conv2d_1a_3x3", "Mixed_5b.branch5x5_2", "Mixed_6a.branch3x3dbl_3", "Mixed_6e.branch7x7dbl_5"}
    assert names >= {"Mixed_7a.branch7x7x3_4", "Mixed_7b.branch3x3dbl_3b", "Mixed_7c.branch_pool"}


@torch.no_grad()
def test_a_block_puts_its_branches_side_by_side(network: InceptionV3) -> None:
    """The last two, which differ in their pools, written out."""

    def convolve(block: nn.Module, name: str, x: Tensor) -> Tensor:
        layer = block.get_submodule(name)
        kernel = layer.conv.weight.shape[2:]
        y = F.conv2d(x, layer.conv.weight, padding=(kernel[0] // 2, kernel[1] // 2))
        norm = layer.bn
        return F.relu(F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-3))

    for name, channels in (("Mixed_7b", 1280), ("Mixed_7c", 2048)):
        block, x = network.get_submodule(name), torch.randn(1, channels, 8, 8)
        first = convolve(block, "branch3x3_1", x)
        second = convolve(block, "branch3x3dbl_2", convolve(block, "branch3x3dbl_1", x))
        pooled = F.max_pool2d(x, 3, 1, 1)
        if name == "Mixed_7b":
            pooled = F.avg_pool2d(x, 3, 1, 1) * 9 / F.avg_pool2d(torch.ones(1, 1, 8, 8), 3, 1, 1) / 9
        expected = [convolve(block, "branch1x1", x)]
        expected += [convolve(block, f"branch3x3_2{part}", first) for part in "ab"]
        expected += [convolve(block, f"branch3x3dbl_3{part}", second) for part in "ab"]
        expected += [convolve(block, "branch_pool", pooled)]
        torch.testing.assert_close(block(x), torch.cat(expected, 1), rtol=1e-4, atol=1e-4)


def test_a_file_gives_back_what_it_holds(file: Path, network: InceptionV3) -> None:
    stored = torch.load(file, weights_only=True)
    own = network.state_dict()
    assert all(torch.equal(own[name], value) for name, value in stored.items())


def test_another_inception_is_refused_with_what_is_expected(tmp_path: Path, file: Path) -> None:
    stored = torch.load(file, weights_only=True)
    google = {**stored, "fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    torch.save(google, tmp_path / "inception_v3_google-0cc3c7bd.pth")
    expected = r"fc\.weight has shape \(1000, 2048\) where \(1008, 2048\) is expected; give pt_inception-2015-12-05"
    with pytest.raises(CheckpointError, match=expected) as error:
        load_inception(tmp_path / "inception_v3_google-0cc3c7bd.pth", "--weights")
    assert "\n" not in str(error.value)
    save_file({"layer1.weight": torch.zeros(2)}, tmp_path / "resnet.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor Conv2d_1a_3x3\.conv\.weight; give pt_inception"):
        load_inception(tmp_path / "resnet.safetensors", "--weights")
    with pytest.raises(CheckpointError, match=r"--weights = .*absent\.pth is not a file; give pt_inception"):
        load_inception(tmp_path / "absent.pth", "--weights")
