"""Plans: every parameter is under exactly one entry, every entry matches, and what it names can be sharded."""

import dataclasses

import pytest
import torch

from megadiff.config.schema import ModelConfig
from megadiff.dist.grid import Axis
from megadiff.errors import PlanError
from megadiff.models import build_network, chain_builders
from megadiff.models.chain import Chain
from megadiff.parallel.plan import Plan, apply_plan, check_plan, matches
from megadiff.parallel.plans import dit_plan

MODEL = ModelConfig(hidden_size=32, num_heads=4, num_layers=2, input_size=8, qk_norm=True)


def axis(index: int, degree: int = 2) -> Axis:
    """One rank of a tensor axis; building and sharding need no process group."""
    return Axis(degree, index, tuple(range(degree)), None)  # type: ignore[arg-type]


def network(model: ModelConfig = MODEL) -> Chain:
    """The unsharded network on the meta device."""
    return Chain(chain_builders(model))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_plan_fits_the_network(qk_norm: bool) -> None:
    model = MODEL.model_copy(update={"qk_norm": qk_norm})
    check_plan(dit_plan(model), network(model))


def test_a_plan_without_the_qk_norms_is_refused() -> None:
    plan = dataclasses.replace(dit_plan(MODEL), partial=())
    with pytest.raises(PlanError, match=r"parameter blocks\.0\.attn\.q_norm\.weight .* not under \[\]"):
        check_plan(plan, network())


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("replicated", "embed.patch.gamma"),
        ("partial", "blocks.*.attn.v_norm.weight"),
        ("regions", "blocks.*.ffn"),
        ("sharded_dropout", "blocks.*.attn.drop"),
        ("token_dropout", "blocks.*.drop"),
    ],
)
def test_an_entry_that_matches_nothing_is_refused(field: str, entry: str) -> None:
    plan = dit_plan(MODEL)
    plan = dataclasses.replace(plan, **{field: (*getattr(plan, field), entry)})
    with pytest.raises(PlanError) as raised:
        check_plan(plan, network())
    assert repr([entry]) in str(raised.value)


def test_a_style_that_matches_nothing_is_refused() -> None:
    plan = dit_plan(MODEL)
    plan = dataclasses.replace(plan, styles={**plan.styles, "blocks.*.mlp.fc3": "row"})
    with pytest.raises(PlanError, match=r"blocks\.\*\.mlp\.fc3"):
        check_plan(plan, network())


def test_a_parameter_under_two_entries_is_refused() -> None:
    plan = dit_plan(MODEL)
    plan = dataclasses.replace(plan, replicated=(*plan.replicated, "blocks.*.attn.[kv].weight"))
    with pytest.raises(PlanError, match=r"blocks\.0\.attn\.k\.weight must fall under exactly one entry"):
        check_plan(plan, network())


def test_a_style_that_does_not_fit_the_module_is_refused() -> None:
    plan = Plan(styles={"embed.label": "column"}, regions=(), replicated=())
    with pytest.raises(PlanError, match=r"embed\.label is a Embedding; the style column does not shard such layers"):
        apply_plan(network(), plan, axis(0), False)


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tensor_model_parallel_size = 3 does not divide"):
        apply_plan(network(), dit_plan(MODEL), axis(0, 3), False)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*.attn", "blocks.7.attn", True),
        ("blocks.*.attn", "blocks.7.attn.q", False),
        ("blocks.*.attn.[qkv]", "blocks.7.attn.k", True),
        ("blocks.*.attn.[qkv]", "blocks.7.attn.out", False),
        ("a.b", "axb", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("sequence", [False, True])
def test_slices_of_all_ranks_make_up_every_sharded_parameter(sequence: bool) -> None:
    whole = dict(build_network(MODEL, 0).named_parameters())
    for degree in (2, 4):
        shardings = []
        for index in range(degree):
            chain = network()
            shardings.append(apply_plan(chain, dit_plan(MODEL), axis(index, degree), sequence))
            for name, parameter in chain.named_parameters():
                part = shardings[-1].local_part(name, whole[name])
                assert part.shape == parameter.shape, name
                is_sharded = name in shardings[-1].slices
                assert getattr(parameter, "tensor_model_parallel", False) is is_sharded, name
        names = shardings[0].slices
        assert len(names) == 2 * (3 * 2 + 1 + 2 + 1 + 2), "q, k, v, fc1 and modulation with bias; out and fc2 without"
        for name, part in names.items():
            parts = [sharding.local_part(name, whole[name]) for sharding in shardings]
            assert torch.equal(torch.cat(parts, dim=part.dim), whole[name])
            starts = [sharding.slices[name].offset[part.dim] for sharding in shardings]
            assert starts == [index * parts[0].shape[part.dim] for index in range(degree)]
