"""The feature cache: parts make up the network, each position decides alone, nothing passes stale through it."""

import pytest
import torch
from torch import Tensor

from megadiff.config.schema import ModelConfig
from megadiff.models.chain import Chain, State
from megadiff.models.feature_cache import FeatureCache, HitRate, Part, cached_parts
from tests.models.networks import preset, random_inputs, random_network

NETWORKS = {
    "dit": preset("dit-tiny-test", num_layers=4),
    "dit with long skips": preset("dit-tiny-test", num_layers=6, long_skips=True),
    "unet": preset("unet-tiny-test"),
    "unet of five levels": preset(
        "unet-tiny-test",
        input_size=32,
        block_out_channels=(32, 32, 32, 32, 32),
        transformer_layers_per_block=(0, 0, 0, 0, 1),
    ),
}


def names_of(part: Part) -> tuple[str, ...]:
    assert isinstance(part.run, Chain)
    return part.run.layer_names


@pytest.mark.parametrize("name", NETWORKS)
def test_parts_are_the_network_bit_for_bit(name: str) -> None:
    model = NETWORKS[name]
    network, inputs = random_network(model), random_inputs(model)
    parts = cached_parts(network, model)
    assert [layer for part in parts for layer in names_of(part)] == list(network.layer_names)
    with torch.no_grad():
        rate = HitRate()
        assert torch.equal(FeatureCache(parts, 1.0, rate)(inputs), network(inputs))
        assert rate.hits == 0 and rate.lookups == len(inputs[0]) * sum(part.is_cached for part in parts)
        # A first call has nothing to reuse.
        assert torch.equal(FeatureCache(parts, 0.0, rate)(inputs), network(inputs))


def test_the_first_blocks_and_the_first_two_levels_always_run() -> None:
    def kept(name: str) -> list[str]:
        model = NETWORKS[name]
        parts = cached_parts(random_network(model), model)
        return [layer for part in parts if not part.is_cached for layer in names_of(part)]

    assert kept("dit") == ["embed", "blocks.0", "head"]
    levels = {".".join(layer.split(".")[:2]) for layer in kept("unet of five levels")}
    assert levels == {"embed", "head", *(f"{way}.{level}" for way in ("down", "up") for level in (0, 1))}


def test_one_comparison_decides_for_the_third_level_and_all_within_it() -> None:
    model = NETWORKS["unet of five levels"]
    assert sum(part.is_cached for part in cached_parts(random_network(model), model)) == 1


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_inputs_reuse_everything_and_give_the_same(name: str) -> None:
    model = NETWORKS[name]
    network, inputs = random_network(model), random_inputs(model, 3)
    cache = FeatureCache(cached_parts(network, model), 0.99, rate := HitRate())
    with torch.no_grad():
        first, again = cache(inputs), cache(inputs)
    torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)
    assert rate.hits == rate.lookups / 2


@pytest.mark.parametrize("name", NETWORKS)
def test_each_picture_decides_alone(name: str) -> None:
    """Of four, two change their noise altogether; the others' results do not depend on them."""
    model = NETWORKS[name]
    network, inputs = random_network(model), random_inputs(model, 4)
    x_t, t, labels = inputs
    changed = torch.tensor([1, 3])
    second = x_t.clone()
    second[changed] = -second[changed]
    parts = cached_parts(network, model)
    cache = FeatureCache(parts, 0.5, rate := HitRate())
    with torch.no_grad():
        first = cache(inputs)
        before = rate.hits
        found = cache((second, t, labels))
        exact = network((second, t, labels))
    torch.testing.assert_close(found[[0, 2]], first[[0, 2]], rtol=1e-12, atol=1e-12)
    assert before == 0 and rate.hits >= 2 * sum(part.is_cached for part in parts)
    alone = FeatureCache(parts, 0.5, HitRate())
    with torch.no_grad():
        alone((x_t[1:2], t[1:2], labels[1:2]))
        expected = alone((second[1:2], t[1:2], labels[1:2]))
    torch.testing.assert_close(found[1:2], expected, rtol=1e-12, atol=1e-12)
    if model.name == "dit":
        torch.testing.assert_close(found[changed], exact[changed], rtol=1e-10, atol=1e-10)


def counted(outputs: list[float]) -> tuple[Part, list[int]]:
    """A part that answers with growing numbers, and the sizes of its batches."""
    sizes: list[int] = []

    def run(state: State) -> State:
        sizes.append(len(state[0]))
        outputs.append(len(outputs) + 1.0)
        return torch.full((len(state[0]), 1), outputs[-1]), state[1]

    return Part(run, is_cached=True), sizes


def call(cache: FeatureCache, *angles: float) -> list[float]:
    """Answers for features that are unit vectors of these angles in degrees."""
    radians = torch.tensor(angles).deg2rad()
    features = torch.stack([radians.cos(), radians.sin()], dim=1)
    result: tuple[Tensor, Tensor] = cache((features, torch.arange(len(angles))))  # type: ignore[assignment]
    return result[0].flatten().tolist()


def test_reuse_is_strictly_above_the_threshold() -> None:
    """0.5 is the cosine of 60 degrees."""
    part, sizes = counted([])
    cache = FeatureCache([part], 0.5, HitRate())
    assert call(cache, 0.0) == [1.0]
    assert call(cache, 59.9) == [1.0]
    assert call(cache, 60.1) == [2.0]
    assert sizes == [1, 1]
    part, sizes = counted([])
    never = FeatureCache([part], 1.0, HitRate())
    assert call(never, 0.0) == [1.0] and call(never, 0.0) == [2.0]


def test_the_nearest_of_several_entries_is_taken_and_the_oldest_goes_first() -> None:
    part, _ = counted([])
    cache = FeatureCache([part], 0.9, rate := HitRate())
    near = [round(call(cache, angle)[0]) for angle in (0.0, 90.0, 10.0, 85.0)]  # rounded to the nearer entry
    assert near == [1, 2, 1, 2]
    assert round(call(cache, 4.0)[0]) == 1  # the first entry is used, so that the second is the oldest
    assert call(cache, 180.0) == [3.0]
    assert call(cache, 0.0) == [1.0]
    assert call(cache, 90.0) == [4.0], "the entry at 90 degrees made room"
    assert (rate.hits, rate.lookups) == (4, 8)


@pytest.mark.parametrize("keeps_shape", [True, False])
def test_two_results_make_a_line(keeps_shape: bool) -> None:
    """A linear part is met on the line through two entries, up to their distance beyond the nearer one."""
    first, second, matrix = torch.randn(3, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first[..., :4], second[..., 4:] = 0, 0  # a right angle, too far to be reused
    matrix = matrix[0] if keeps_shape else matrix[0, :, :5]
    sizes: list[int] = []

    def run(state: State) -> State:
        sizes.append(len(state[0]))
        return (state[0] @ matrix,)

    cache = FeatureCache([Part(run, is_cached=True)], 0.5, HitRate())

    def ask(place: float) -> Tensor:
        result: tuple[Tensor] = cache((first + place * (second - first),))  # type: ignore[assignment]
        return result[0]

    def added(place: float) -> Tensor:
        return (first + place * (second - first)) @ (matrix - torch.eye(8) if keeps_shape else matrix)

    ask(0.0)
    ask(1.0)
    for place, of in ((-0.5, -0.5), (0.2, 0.2), (0.9, 0.9), (1.3, 1.3), (2.0, 2.0), (4.0, 2.0)):
        found = ask(place) - (first + place * (second - first) if keeps_shape else 0)
        torch.testing.assert_close(found, added(of), rtol=1e-6, atol=1e-6)
    assert sizes == [2, 2]


def test_a_single_result_stands_as_it_is() -> None:
    part, _ = counted([])
    cache = FeatureCache([part], 0.5, HitRate())
    assert call(cache, 0.0, 90.0) == [1.0, 1.0]
    assert call(cache, 30.0, 90.0) == [1.0, 1.0]
    assert call(cache, 90.0, 90.0) == [2.0, 1.0]  # now the first position has two, the second an empty place
    assert call(cache, 90.0, 120.0) == [2.0, 1.0]


def test_entries_belong_to_their_position() -> None:
    part, sizes = counted([])
    cache = FeatureCache([part], 0.9, HitRate())
    assert call(cache, 0.0, 90.0) == [1.0, 1.0]
    assert call(cache, 90.0, 90.0) == [2.0, 1.0]
    assert sizes == [2, 1]


def test_guidance_may_begin_and_end_later() -> None:
    """The batch doubles where guidance acts; the answers of the first half stay."""
    part, sizes = counted([])
    cache = FeatureCache([part], 0.9, HitRate())
    assert call(cache, 0.0) == [1.0]
    assert call(cache, 1.0, 1.0) == [1.0, 2.0]
    assert call(cache, 2.0) == [1.0]
    assert call(cache, 2.0, 2.0) == [1.0, 2.0]
    assert sizes == [1, 1]


def test_what_a_part_passes_through_is_never_stale() -> None:
    part, _ = counted([])
    cache = FeatureCache([part], 0.5, HitRate())
    features = torch.ones(2, 3)
    cache((features, torch.tensor([1, 2])))
    result: tuple[Tensor, Tensor] = cache((features, torch.tensor([7, 8])))  # type: ignore[assignment]
    assert result[1].tolist() == [7, 8]


@pytest.mark.parametrize(("num_layers", "deciding"), [(2, 1), (6, 1), (12, 2), (28, 4)])
def test_how_many_blocks_decide(num_layers: int, deciding: int) -> None:
    model: ModelConfig = preset("dit-tiny-test", num_layers=num_layers)
    chain = random_network(model, torch.float32)
    first = next(part for part in cached_parts(chain, model) if part.is_cached)
    assert names_of(first)[0] == f"blocks.{deciding}"
