"""What crosses between stages: packed without loss, in the order that the next stage expects, no more."""

import pytest
import torch

from megadiff.config.schema import ModelConfig
from megadiff.models import build_network, long_skips
from megadiff.parallel.boundary import Boundary, boundary_before, crossing_skips
from tests.parity.networks import TEXT_UNET, UDIT, UNET, parity_config, probe

NETWORKS = {"UNet": UNET, "text UNet": TEXT_UNET, "U-shaped DiT": UDIT}


def test_packing_keeps_every_value_and_the_layout_of_maps() -> None:
    boundary = Boundary(((3, 4, 5), (7,), (2, 6), (1, 2, 2)))
    state = [torch.randn(2, *shape) for shape in boundary.shapes]
    state[0] = state[0].contiguous(memory_format=torch.channels_last)
    packed = boundary.pack(tuple(state))
    assert packed.shape == (2, boundary.numel) and boundary.numel == 60 + 7 + 12 + 4
    for found, right in zip(boundary.unpack(packed), state, strict=True):
        assert torch.equal(found, right)
        assert found.dim() != 4 or found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_state_before_every_layer_fits_its_boundary(name: str) -> None:
    model: ModelConfig = NETWORKS[name]
    config = parity_config(pipeline=2, schedule="1f1b", model=model)
    network = build_network(model, 0)
    order = network.layer_names
    for cut in range(1, len(order)):
        first = network.part(order[:cut], skips_stay=False)
        state = first(probe(config))
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in state)
        assert shapes == boundary_before(config, order[cut]).shapes, order[cut]


@pytest.mark.parametrize("name", NETWORKS)
def test_no_skip_crosses_where_the_pipeline_is_folded(name: str) -> None:
    model = NETWORKS[name]
    opened, folded = (parity_config(pipeline=2, schedule=kind, model=model) for kind in ("1f1b", "folded"))
    layers = build_network(model, 0).layer_names[1:]
    assert max(len(crossing_skips(model, layer)) for layer in layers) == len(long_skips(model))
    for layer in layers:
        without, full = boundary_before(folded, layer).shapes, boundary_before(opened, layer).shapes
        assert full[: len(without)] == without
        assert len(full) - len(without) == len(crossing_skips(model, layer))


def test_tokens_are_those_of_one_tensor_rank_under_sequence_parallelism() -> None:
    plain = parity_config(tensor=2, pipeline=2, schedule="1f1b", model=UDIT)
    split = parity_config(tensor=2, pipeline=2, schedule="1f1b", sequence_parallel=True, model=UDIT)
    assert boundary_before(split, "blocks.0").shapes == boundary_before(plain, "blocks.0").shapes
    for (tokens, *_), (half, *_) in (
        (boundary_before(plain, layer).shapes, boundary_before(split, layer).shapes) for layer in ("blocks.1", "head")
    ):
        assert half == (tokens[0] // 2, tokens[1])
