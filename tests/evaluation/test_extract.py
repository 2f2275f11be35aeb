"""Features come from the cache where nothing changed, and only there."""

from pathlib import Path

import pytest
import torch

from megadiff.data.dataset import to_signed_unit
from megadiff.errors import DataError
from megadiff.evaluation.extract import Work, extract
from megadiff.evaluation.images import open_files
from megadiff.sampling.images import to_uint8
from tests.evaluation.sets import counting_space, noise, save_set

WORK = Work(batch_size=4, device=torch.device("cpu"), threads=2)


def test_features_are_the_networks_on_all_pictures_in_order(tmp_path: Path) -> None:
    images = noise(10)
    network, space = counting_space()
    found = extract(open_files(save_set(tmp_path, images), None, 1), space, WORK, tmp_path / "cache")
    expected = network(to_signed_unit(to_uint8(images)))
    torch.testing.assert_close(found.values, expected.values)
    assert found.logits is not None and expected.logits is not None
    torch.testing.assert_close(found.logits, expected.logits)


def test_a_second_call_computes_nothing(tmp_path: Path) -> None:
    folder, cache = save_set(tmp_path / "set", noise(10)), tmp_path / "cache"
    network, space = counting_space()
    first = extract(open_files(folder, None, 1), space, WORK, cache)
    assert network.seen == 10
    other, again = counting_space()
    second = extract(open_files(folder, None, 1), again, Work(3, torch.device("cpu"), 1), cache)
    assert other.seen == 0 and torch.equal(first.values, second.values) and first.logits is not None
    assert torch.equal(first.logits, second.logits if second.logits is not None else torch.empty(0))
    assert len(list(cache.iterdir())) == 1


def test_another_picture_size_network_or_subset_is_computed_anew(tmp_path: Path) -> None:
    folder, cache = save_set(tmp_path / "set", noise(10)), tmp_path / "cache"
    network, space = counting_space()
    extract(open_files(folder, None, 1), space, WORK, cache)
    extract(open_files(folder, 8, 1), space, WORK, cache)
    assert network.seen == 20, "another size"
    extract(open_files(folder, None, 1).choose(6), space, WORK, cache)
    assert network.seen == 26, "a subset"
    save_set(folder, noise(1, seed=5), ("00004.png",))
    changed = extract(open_files(folder, None, 1), space, WORK, cache)
    assert network.seen == 36, "a changed picture"
    doubled, other = counting_space(2.0)
    found = extract(open_files(folder, None, 1), other, WORK, cache)
    assert doubled.seen == 10 and torch.equal(found.values, 2 * changed.values), "other weights"


def test_a_damaged_or_unwritable_cache_is_told_in_one_line(tmp_path: Path) -> None:
    folder, cache = save_set(tmp_path / "set", noise(4)), tmp_path / "cache"
    space = counting_space()[1]
    extract(open_files(folder, None, 1), space, WORK, cache)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(DataError, match=r"is damaged .*; delete it") as error:
        extract(open_files(folder, None, 1), space, WORK, cache)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(DataError, match="choose another folder"):
        extract(open_files(folder, None, 1), space, WORK, folder / "00000.png")
