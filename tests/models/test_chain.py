"""A chain: any subset of its layers under global names, long skips, recomputation segments, dropout seeds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megadiff.config.schema import ModelConfig
from megadiff.models import build_network, chain_builders, materialize
from megadiff.models.build import long_skips
from megadiff.models.chain import Chain, State, mix_seed
from tests.models import networks
from tests.models.networks import entering_states, preset

SKIPPING = ("unet-tiny-test", "unet-text-tiny-test", "udit-tiny")
MODEL = ModelConfig(hidden_size=16, num_heads=2, num_layers=5, input_size=4, num_classes=3, qk_norm=True, dropout=0.3)


def random_network() -> Chain:
    """The network with random parameters."""
    network = build_network(MODEL, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return network


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """A small batch."""
    x_t = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return x_t, torch.tensor([3, 700]), torch.tensor([0, 3])


def test_parts_keep_global_names_and_compute_what_the_whole_does() -> None:
    network = random_network().eval()
    values = dict(network.named_parameters())
    state: object = inputs()
    names: list[str] = []
    for only in (["embed", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.4", "blocks.3"], ["head"]):
        part = materialize(Chain(chain_builders(MODEL), only=only), MODEL, 0).eval()
        part.load_state_dict({name: values[name] for name, _ in part.named_parameters()})
        names += [name for name, _ in part.named_parameters()]
        state = part(state)
    assert sorted(names) == sorted(values)
    assert torch.equal(state, network(inputs()))


@pytest.mark.parametrize("name", SKIPPING)
def test_parts_pass_skips_through_the_state_at_every_cut(name: str) -> None:
    """Two parts, and three of which the middle one is a single layer that most skips only pass through."""
    model = preset(name)
    network, inputs = networks.random_network(model).eval(), networks.random_inputs(model)
    expected, states, names = network(inputs), entering_states(network, inputs), network.layer_names
    for cut in range(1, len(names)):
        state = network.part(names[:cut], skips_stay=False)(inputs)
        passing = network.part(names[cut:], skips_stay=False).incoming
        assert len(state) == len(_without_skip(states[names[cut]], names[cut], network)) + len(passing)
        assert torch.equal(network.part(names[cut:], skips_stay=False)(state), expected), names[cut]
        middle = network.part(names[cut : cut + 1], skips_stay=False)(state)
        if cut + 1 < len(names):
            assert torch.equal(network.part(names[cut + 1 :], skips_stay=False)(middle), expected), names[cut]


def _without_skip(state: State, name: str, network: Chain) -> State:
    return state[:-1] if name in network.skips else state


@pytest.mark.parametrize("name", SKIPPING)
def test_parts_hand_over_skips_that_stay_at_every_cut(name: str) -> None:
    """Skips of three parts are held by the caller and join the state of the part that takes them."""
    model = preset(name)
    network, inputs = networks.random_network(model).eval(), networks.random_inputs(model)
    expected, names = network(inputs), network.layer_names
    takers = {source: taker for taker, source in network.skips.items()}
    for cut in range(1, len(names) - 1):
        state: State = inputs
        held: dict[str, Tensor] = {}
        for part_names in (names[:cut], names[cut : cut + 2], names[cut + 2 :]):
            if not part_names:
                continue
            part = network.part(part_names, skips_stay=True)
            assert set(part.incoming) == {s for s, t in takers.items() if t in part_names and s not in part_names}
            state = part((*state, *(held.pop(source) for source in part.incoming)))
            given = [source for source in part_names if source in takers and takers[source] not in part_names]
            if given:
                held.update(zip(given, state[-len(given) :], strict=True))
                state = state[: -len(given)]
        assert not held
        assert torch.equal(state, expected), names[cut]


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(KeyError, match=r"blocks\.5"):
        Chain(chain_builders(MODEL), only=["blocks.5"])


def test_initial_values_depend_on_seed_and_name_only() -> None:
    whole = dict(build_network(MODEL, 7).named_parameters())
    part = materialize(Chain(chain_builders(MODEL), only=["blocks.3", "head"]), MODEL, 7)
    assert all(torch.equal(value, whole[name]) for name, value in part.named_parameters())
    other = dict(build_network(MODEL, 8).named_parameters())
    assert not torch.equal(other["embed.patch.weight"], whole["embed.patch.weight"])
    assert not torch.equal(whole["blocks.0.attn.q.weight"], whole["blocks.1.attn.q.weight"])


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1, [1, 1, 1, 1, 1, 1, 1]), (2, [1, 2, 2, 1, 1]), (3, [1, 3, 2, 1]), (99, [1, 5, 1])],
)
def test_segments_cover_the_layers_in_order(every: int, expected: list[int]) -> None:
    network = Chain(chain_builders(MODEL))
    network.set_recompute("full", every)
    segments = network.segments()
    assert [len(segment) for segment in segments] == expected
    assert tuple(name for segment in segments for name in segment) == network.layer_names


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_b13_recomputation_replays_dropout_bit_for_bit(mode: str, every: int) -> None:
    """Without seeds of the chain, as a plain PyTorch loop would use it, and with them."""
    for seeds in (None, [11]):
        gradients = []
        for recompute in ("none", mode):
            network = random_network().train()
            network.set_recompute(recompute, every)
            network.dropout_seeds = None if seeds is None else iter(seeds)
            torch.manual_seed(5)
            network(inputs()).square().sum().backward()
            gradients.append([parameter.grad for parameter in network.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("name", SKIPPING)
def test_segments_take_skips_first_and_give_them_last(name: str, every: int) -> None:
    model = preset(name)
    network = Chain(chain_builders(model), skips=long_skips(model))
    network.set_recompute("full", every)
    segments = network.segments()
    assert tuple(layer for segment in segments for layer in segment) == network.layer_names
    # Every block of the U-shaped DiT but the middle one begins or ends a skip.
    longest = {"udit-tiny": 1, "unet-tiny-test": 3}.get(name, every)
    assert max(map(len, segments)) == min(every, longest)
    for segment in segments:
        assert not network.skips.keys() & set(segment[1:])
        assert not network.sources & set(segment[:-1])


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("name", SKIPPING)
def test_b13_recomputation_with_skips_replays_dropout_bit_for_bit(name: str, every: int, mode: str) -> None:
    model = preset(name, dropout=0.3, attention_dropout=0.2, skip_shift=name == "unet-tiny-test")
    gradients, calls = {}, {}
    for recompute in ("none", mode):
        network = networks.random_network(model).train()
        network.set_recompute(recompute, every)
        network.dropout_seeds = iter([11])
        calls[recompute] = counted(network)
        network(networks.random_inputs(model)).square().sum().backward()
        gradients[recompute] = {key: parameter.grad for key, parameter in network.named_parameters()}
    assert all(torch.equal(gradient, gradients[mode][key]) for key, gradient in gradients["none"].items())
    for layer, count in calls["none"].items():
        assert (count, calls[mode][layer]) == (1, 2 if "." in layer else 1), layer


def counted(network: Chain) -> dict[str, int]:
    """How often each layer runs from now on."""
    calls = dict.fromkeys(network.layer_names, 0)

    def count_of(name: str) -> Callable[[nn.Module, object], None]:
        def count(layer: nn.Module, arguments: object) -> None:
            calls[name] += 1

        return count

    for name in calls:
        network.layer(name).register_forward_pre_hook(count_of(name))
    return calls


def test_dropout_depends_on_the_seed_and_not_on_the_generator() -> None:
    network = random_network().train()
    outputs = []
    for seed, state in ((1, 0), (1, 99), (2, 0)):
        torch.manual_seed(state)
        network.dropout_seeds = iter([seed])
        outputs.append(network(inputs()))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_mixed_seeds_are_distinct_and_fit_into_63_bits() -> None:
    seeds = [mix_seed(a, b) for a in range(60) for b in range(60)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 2) != mix_seed(2, 1)
