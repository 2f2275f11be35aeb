"""The feature space of the embedded emoji: trained once, always the same, and able to tell what samples lack."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megadiff.data.emoji import open_emoji
from megadiff.errors import DataError
from megadiff.evaluation import embedded
from megadiff.evaluation.embedded import open_embedded
from megadiff.evaluation.features import FeatureSpace, train_features
from megadiff.evaluation.quality import Quality, judge


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def space(cache: Path) -> FeatureSpace:
    return open_embedded(cache)


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    """A random half of the emoji, (N, 3, 32, 32)."""
    dataset = open_emoji(32, "subgroup")
    rows = random.Random(0).sample(range(len(dataset)), 800)
    return torch.stack([dataset.load(row)[0] for row in rows])


def test_it_is_trained_once(cache: Path, space: FeatureSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(embedded, "train_features")
    again = open_embedded(cache)
    assert again.fingerprint == space.fingerprint and not space.is_fid
    assert all(torch.equal(a, b) for a, b in zip(again.network.buffers(), space.network.buffers(), strict=True))


def test_features_have_a_mean_square_of_one_and_classes(space: FeatureSpace, pictures: Tensor) -> None:
    found = space.network(pictures)
    assert found.values.shape == (800, 64) and found.logits is not None and found.logits.shape == (800, 99)
    assert float(found.values.square().mean()) == pytest.approx(1.0, abs=0.1)


def test_other_sizes_are_resized(space: FeatureSpace, pictures: Tensor) -> None:
    """A picture enlarged by whole pixels stays nearer to itself than to others."""
    small = pictures[:50]
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    first, second = space.network(small).values, space.network(large).values
    assert torch.equal(torch.cdist(first, second).argmin(1), torch.arange(50))


def test_training_does_not_touch_the_random_state() -> None:
    images, labels = torch.zeros(4, 3, 8, 8), torch.arange(4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = train_features(images, labels, 4, 2)
    assert torch.equal(torch.rand(3), expected)
    second = train_features(images, labels, 4, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def figures(space: FeatureSpace, real: Tensor, fake: Tensor) -> Quality:
    of_real, of_fake = space.network(real), space.network(fake)
    return judge(of_real.values, of_fake.values, of_fake.logits)


def test_noise_and_collapse_show(space: FeatureSpace, pictures: Tensor) -> None:
    """Distances grow with noise; repeated samples keep precision and lose recall, coverage and inception score."""
    real, good = pictures[:400], pictures[400:]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(good.shape, generator=generator)
    clean, little, much = (figures(space, real, good + amount * noise) for amount in (0.0, 0.4, 1.2))
    assert clean.frechet < little.frechet < much.frechet and clean.kernel < little.kernel < much.kernel
    collapsed = figures(space, real, good[:5].repeat(80, 1, 1, 1) + 0.01 * noise)
    assert clean.recall > 0.7 and collapsed.recall < 0.1 and collapsed.precision > 0.5
    assert clean.coverage > 0.9 and collapsed.coverage < 0.2
    assert clean.inception_score is not None and collapsed.inception_score is not None
    assert collapsed.inception_score < 6 < clean.inception_score


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, cache: Path, space: FeatureSpace) -> None:
    (file,) = cache.glob("emoji_classifier_*.safetensors")
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="is damaged"):
        open_embedded(tmp_path)
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(1)}, copy)
    with pytest.raises(DataError, match="is no classifier of emoji; delete it"):
        open_embedded(tmp_path)
