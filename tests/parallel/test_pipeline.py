"""A pipeline walks each block's graph once a micro-batch."""

from collections.abc import Mapping

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megadiff.config.schema import Config
from tests.parity.jobs import ready_engine, train_one_step
from tests.parity.networks import parity_config
from tests.pool import WorkerPool

PARTS = {"embed": ".time.fc2", "head": ".out"}  # what is watched of the layers that are not blocks


def count_backwards(config: Config, once: bool) -> dict[str, int]:
    """How often a step's backward passes reach a part of each layer; `once` False: DeepSpeed's own way."""
    engine = ready_engine(config)
    if not once:
        engine.deepspeed._INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP
    counts: dict[str, int] = {}

    def watch(name: str, module: nn.Module) -> None:
        counts[name] = 0

        def count(*_: object) -> None:
            counts[name] += 1

        module.register_full_backward_hook(count)

    for name in engine.chain.layer_names:
        watch(name, engine.chain.get_submodule(name + PARTS.get(name, ".mlp")))
    train_one_step(engine, 0)
    return counts


def test_each_layer_is_walked_once_a_micro_batch(pools: Mapping[int, WorkerPool]) -> None:
    for recompute in ("none", "full"):
        config = parity_config(pipeline=2, accumulation=4, recompute=recompute)
        first, last = pools[2].run(count_backwards, config=config, once=True)
        blocks = [f"blocks.{index}" for index in range(config.model.num_layers)]
        assert first | last == dict.fromkeys(["embed", *blocks, "head"], 4)


def test_the_count_sees_a_graph_that_is_walked_for_each_output(pools: Mapping[int, WorkerPool]) -> None:
    """Both outputs of the first stage, tokens and condition, come from the time embedding."""
    first, _ = pools[2].run(count_backwards, config=parity_config(pipeline=2), once=False)
    assert first["embed"] == 2 * 2
