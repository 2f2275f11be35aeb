"""What the dry run says of pipeline schedules: bytes against those of the planner, costs against the network's."""

import pytest

from megadiff.config.layout import Layout, resolve_layout
from megadiff.config.presets import preset_values
from megadiff.config.schema import Config, ModelConfig
from megadiff.models.flops import layer_flops
from megadiff.planner.activations import activation_bytes
from megadiff.planner.schedules import FLOPS_PER_SECOND, ScheduleCost, schedule_costs, stage_costs
from megadiff.planner.traffic import pipeline_traffic
from tests.planner.networks import small_config


def planned(model: ModelConfig | None, ranks: int, **settings: object) -> tuple[Config, Layout]:
    config = small_config(model=model, pipeline=ranks, **settings)
    train = config.train.model_copy(update={"global_batch_size": 2 * ranks, "micro_batch_size": 1})
    config = config.model_copy(update={"train": train})
    return config, resolve_layout(config, ranks)


def by_name(config: Config, layout: Layout) -> dict[str, ScheduleCost]:
    return {cost.schedule: cost for cost in schedule_costs(config, layout, activation_bytes(config, layout))}


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_bytes_of_a_micro_batch_are_those_that_the_ranks_send(schedule: str) -> None:
    config, layout = planned(ModelConfig(**preset_values("udit-tiny")), 2, schedule=schedule)
    sent = sum(
        size
        for rank in range(2)
        for transfer, size in pipeline_traffic(config, layout, rank).items()
        if transfer.kind == "send"
    )
    costs = by_name(config, layout)
    assert costs[schedule].micro_batch_bytes == sent
    assert [name for name, cost in costs.items() if cost.is_run] == [schedule]
    for cost in costs.values():
        assert sum(cost.simulation.sent_bytes) == layout.accumulation * cost.micro_batch_bytes


@pytest.mark.parametrize("ranks", [4, 8])
def test_folding_the_unet_of_sdxl_saves_four_fifths_of_the_bytes(ranks: int) -> None:
    costs = by_name(*planned(ModelConfig(**preset_values("sdxl")), ranks))
    assert costs["folded"].micro_batch_bytes < 0.2 * costs["1f1b"].micro_batch_bytes


def test_a_chain_too_short_to_fold_is_simulated_unfolded_only() -> None:
    config, layout = planned(ModelConfig(**{**preset_values("dit-tiny-test"), "num_layers": 3}), 4)
    assert {"1f1b", "gpipe", "zb-h1"} <= by_name(config, layout).keys()
    assert "folded" not in by_name(config, layout)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_costs_of_the_stages_add_up_to_the_network(checkpointing: str) -> None:
    model = ModelConfig(**preset_values("unet-tiny-test"))
    config, layout = planned(model, 2, checkpointing=checkpointing)
    stages = stage_costs(config, layout, activation_bytes(config, layout))
    seconds = layout.micro_batch_size * sum(layer_flops(model).values()) / FLOPS_PER_SECOND
    assert sum(stage.forward for stage in stages) == pytest.approx(seconds)
    assert sum(stage.weight for stage in stages) == pytest.approx(seconds)
    again = 1 if checkpointing == "full" else 0
    assert sum(stage.backward for stage in stages) == pytest.approx((2 + again) * seconds)
