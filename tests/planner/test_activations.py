"""Activations of a micro-batch: the meta device against a real forward pass and against what autograd says it saves."""

import pytest
import torch
from torch import Tensor, nn

from megadiff.config.layout import resolve_layout
from megadiff.config.schema import Config, ModelConfig
from megadiff.models import build_network
from megadiff.models.sizes import text_size
from megadiff.planner.activations import Held, activation_bytes
from tests.parity.networks import OPTIONS_UNET, TEXT_UNET, UDIT, UNET
from tests.planner.networks import small_config

NETWORKS = {"DiT": None, "UNet": UNET, "text UNet": TEXT_UNET, "UNet with options": OPTIONS_UNET, "U-shaped DiT": UDIT}
MODES = ("none", "full", "selective")


def predicted(config: Config, processes: int = 1) -> list[int]:
    return activation_bytes(config, resolve_layout(config, processes))


def inputs(model: ModelConfig, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.randn(batch, size) if (size := text_size(model)) else torch.zeros(batch, dtype=torch.int64)
    return torch.randn(batch, model.in_channels, model.input_size, model.input_size), torch.arange(batch), labels


def real_network(config: Config) -> nn.Module:
    chain = build_network(config.model, 0)
    chain.set_recompute(config.train.activation_checkpointing, 1)
    return chain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_meta_device_tells_what_a_real_forward_pass_holds(network: str, mode: str) -> None:
    config = small_config(model=NETWORKS[network], checkpointing=mode)
    batch = resolve_layout(config, 1).micro_batch_size
    chain = real_network(config)
    with Held(chain) as held:
        state = tuple(tensor.clone() for tensor in inputs(config.model, batch))
        output = chain(state)
        measured = held.total
    assert output.requires_grad
    assert predicted(config) == [measured]


@pytest.mark.parametrize("network", NETWORKS)
def test_without_checkpointing_it_is_what_autograd_saves(network: str) -> None:
    """Beside that only the inputs and the output are alive."""
    config = small_config(model=NETWORKS[network])
    batch = resolve_layout(config, 1).micro_batch_size
    chain, state = real_network(config), inputs(config.model, batch)
    outside = {parameter.untyped_storage().data_ptr() for parameter in (*chain.parameters(), *chain.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = chain(state)
    total = sum(size for pointer, size in saved.items() if pointer not in outside)
    around = sum(tensor.nbytes for tensor in (*state, output))
    assert total <= predicted(config)[0] <= total + around


def test_checkpointing_keeps_less() -> None:
    none, full, selective = (predicted(small_config(model=UNET, checkpointing=mode))[0] for mode in MODES)
    assert full < selective < none


def test_full_checkpointing_keeps_one_state_a_block() -> None:
    """Each further block of a DiT holds its input (B, N, D) and nothing else."""
    sizes = [predicted(small_config(num_layers=number, checkpointing="full"))[0] for number in (3, 4, 5)]
    tokens = resolve_layout(small_config(), 1).micro_batch_size * 16 * 32 * 4
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == tokens


@pytest.mark.parametrize("network", ["UNet", "U-shaped DiT"])
def test_skips_of_a_folded_pipeline_are_held_where_they_wait(network: str) -> None:
    """Every stage of a mirrored pair holds something, and all together at least what one process does."""
    whole = predicted(small_config(model=NETWORKS[network]).model_copy(update=_batch(1)))
    folded = predicted(small_config(model=NETWORKS[network], pipeline=2).model_copy(update=_batch(2)), 2)
    assert len(folded) == 4
    assert min(folded) > 0
    assert sum(folded) >= whole[0]


def _batch(pipeline: int) -> dict[str, object]:
    """The same micro-batch whatever the accumulation."""
    train = small_config(pipeline=pipeline).train
    return {"train": train.model_copy(update={"micro_batch_size": 1, "global_batch_size": 2 * pipeline})}


def test_a_tensor_rank_holds_less() -> None:
    whole, half = (predicted(small_config(model=UNET, tensor=tensor), tensor)[0] for tensor in (1, 2))
    assert half < whole
