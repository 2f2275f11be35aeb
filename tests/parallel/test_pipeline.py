"""A pipeline walks each block's graph once a micro-batch, and leaves no skip behind."""

from collections.abc import Mapping

import pytest
from torch import nn

from megadiff.config.schema import Config
from tests.parity.jobs import ready_engine, train_one_step
from tests.parity.networks import DIT, UDIT, parity_config
from tests.pool import WorkerPool

PARTS = {"embed": ".time.fc2", "head": ".out"}  # what is watched of the layers that are not blocks


def count_backwards(config: Config) -> tuple[dict[str, int], bool]:
    """How often a step's backward passes reach a part of each layer, and whether all skips were taken."""
    engine = ready_engine(config)
    counts: dict[str, int] = {}

    def watch(name: str, module: nn.Module) -> None:
        counts[name] = 0

        def count(*_: object) -> None:
            counts[name] += 1

        module.register_full_backward_hook(count)

    for name in engine.chain.layer_names:
        watch(name, engine.chain.get_submodule(name + PARTS.get(name, ".mlp")))
    train_one_step(engine, 0)
    stores = [module.store for module in engine.stage.modules if module.store is not None]
    return counts, all(store.is_empty for store in stores)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
@pytest.mark.parametrize("model", [DIT, UDIT], ids=["DiT", "U-shaped DiT"])
def test_each_layer_is_walked_once_a_micro_batch(
    pools: Mapping[int, WorkerPool], model: object, schedule: str, recompute: str
) -> None:
    config = parity_config(pipeline=2, accumulation=4, recompute=recompute, schedule=schedule, model=model)
    reports = pools[2].run(count_backwards, config=config)
    blocks = [f"blocks.{index}" for index in range(config.model.num_layers)]
    assert reports[0][0] | reports[1][0] == dict.fromkeys(["embed", *blocks, "head"], 4)
    assert all(is_empty for _, is_empty in reports)
