"""B35 and the arithmetic of B19: degrees, world size and the batch triple."""

import itertools
import re

import pytest

from megadiff.config.layout import Layout, resolve_layout
from megadiff.config.load import load_config
from megadiff.config.presets import preset_values
from megadiff.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megadiff.errors import ConfigError

MODEL = ModelConfig(num_heads=12, hidden_size=48)


def make(
    total: int = 64,
    micro: int | None = None,
    accumulation: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
) -> Config:
    train = TrainConfig(global_batch_size=total, micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    parallel = ParallelConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    return Config(model=MODEL, train=train, parallel=parallel)


def holds(total: int, micro: int | None, accumulation: int | None, data: int) -> bool:
    """Whether the triple can be completed, by trying every completion."""
    micros = range(1, total + 1) if micro is None else [micro]
    accumulations = range(1, total + 1) if accumulation is None else [accumulation]
    return any(m * a * data == total for m in micros for a in accumulations)


@pytest.mark.parametrize(("tensor", "pipeline"), list(itertools.product([1, 2, 3], [1, 2, 3])))
def test_b35_every_small_world_is_consistent_or_an_error_with_all_factors(tensor: int, pipeline: int) -> None:
    worlds = range(1, 13)
    for world, total in itertools.product(worlds, (4, 6, 12)):
        for micro, accumulation in itertools.product((None, 1, 2, 3), (None, 1, 2, 4)):
            config = make(total, micro, accumulation, tensor, pipeline)
            data, rest = divmod(world, tensor * pipeline)
            if rest or not data:
                with pytest.raises(ConfigError, match=f"world size {world} is not a multiple of"):
                    resolve_layout(config, world)
            elif holds(total, micro, accumulation, data):
                layout = resolve_layout(config, world)
                assert layout.micro_batch_size * layout.accumulation * layout.data == total
                assert layout.tensor * layout.pipeline * layout.data == world == layout.world_size
                assert micro in (None, layout.micro_batch_size)
                assert accumulation in (None, layout.accumulation)
            else:
                with pytest.raises(ConfigError) as error:
                    resolve_layout(config, world)
                for factor in (
                    f"global_batch_size {total}",
                    f"micro_batch_size {micro or 'derived'}",
                    f"accumulation_steps {accumulation or 'derived'}",
                    f"ranks {data}",
                ):
                    assert factor in str(error.value)


@pytest.mark.parametrize(
    ("config", "world"),
    [(make(64, 4, 8), 4), (make(6, 4), 1), (make(7, None, 2), 1), (make(10), 4), (make(1, 2), 1)],
)
def test_b35_the_batch_size_that_the_message_names_works(config: Config, world: int) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_layout(config, world)
    named = int(str(error.value).rpartition("= ")[2])
    train = config.train.model_copy(update={"global_batch_size": named})
    assert resolve_layout(config.model_copy(update={"train": train}), world).global_batch_size == named


def test_b35_message_prints_every_factor() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_layout(make(200, 4, 8, tensor=2), 16)
    assert str(error.value) == (
        "train.global_batch_size 200 = micro_batch_size 4 x gradient_accumulation_steps 8 x data-parallel "
        "ranks 8 "
        "does not hold: 4 x 8 x 8 = 256; with the other factors as they are, use train.global_batch_size = "
        "256"
    )


def test_b35_model_parallel_ranks_do_not_count_as_data_parallel() -> None:
    assert resolve_layout(make(64, 8, tensor=2, pipeline=2), 8) == Layout(8, 2, 2, 2, 8, 4, 0)


def test_pipeline_gets_a_micro_batch_a_stage_by_default() -> None:
    assert resolve_layout(make(64, pipeline=2), 2) == Layout(2, 1, 2, 1, 32, 2, 0)
    assert resolve_layout(make(9, pipeline=2), 2) == Layout(2, 1, 2, 1, 3, 3, 0)
    assert resolve_layout(make(1, pipeline=2), 2) == Layout(2, 1, 2, 1, 1, 1, 0)
    assert resolve_layout(make(64), 4) == Layout(4, 1, 1, 4, 16, 1, 0)


def make_folded(total: int, micro: int | None = None, accumulation: int | None = None, pipeline: int = 2) -> Config:
    """A UNet, whose pipeline is folded by default."""
    unet = ModelConfig(**preset_values("unet-tiny-test"))
    return make(total, micro, accumulation, pipeline=pipeline).model_copy(update={"model": unet})


def test_folded_pipeline_gets_two_micro_batches_a_rank_by_default() -> None:
    assert resolve_layout(make_folded(64), 2) == Layout(2, 1, 2, 1, 16, 4, 0, folded=True)
    assert resolve_layout(make_folded(20, pipeline=4), 8) == Layout(8, 1, 4, 2, 1, 10, 0, folded=True)
    assert resolve_layout(make_folded(8, micro=2), 2) == Layout(2, 1, 2, 1, 2, 4, 0, folded=True)
    assert resolve_layout(make_folded(4, accumulation=1, pipeline=1), 1) == Layout(1, 1, 1, 1, 4, 1, 0)


@pytest.mark.parametrize(
    ("config", "data", "accumulation"),
    [
        (make_folded(3), 1, 3),
        (make_folded(6), 2, 3),
        (make_folded(6, micro=2), 1, 3),
        (make_folded(6, accumulation=2), 1, 2),
        (make_folded(16, micro=4, accumulation=2), 2, 2),
        (make_folded(6, micro=1, pipeline=4), 1, 6),
    ],
)
def test_too_few_micro_batches_for_a_folded_pipeline_name_what_works(
    config: Config, data: int, accumulation: int
) -> None:
    ranks = config.parallel.pipeline_model_parallel_size
    with pytest.raises(ConfigError) as error:
        resolve_layout(config, data * ranks)
    message = str(error.value)
    assert f"gradient_accumulation_steps = {accumulation} is below the {2 * ranks} micro-batches" in message
    named = re.search(r"use gradient_accumulation_steps = (\d+) with train.global_batch_size = (\d+)", message)
    assert named
    batch = {"gradient_accumulation_steps": int(named[1]), "global_batch_size": int(named[2])}
    repaired = config.model_copy(update={"train": config.train.model_copy(update=batch)})
    assert resolve_layout(repaired, data * ranks).accumulation == 2 * ranks
    straight = config.parallel.model_copy(update={"pipeline_schedule": "1f1b"})
    assert not resolve_layout(config.model_copy(update={"parallel": straight}), data * ranks).folded


def test_b19_layouts_of_one_global_batch_agree_in_samples_and_steps() -> None:
    layouts = [
        resolve_layout(make(32, None, 4), 1),
        resolve_layout(make(32, None, 2), 2),
        resolve_layout(make(32, None, 4, pipeline=2), 2),
    ]
    assert [layout.global_batch_size for layout in layouts] == [32, 32, 32]
    assert [(layout.data, layout.accumulation) for layout in layouts] == [(1, 4), (2, 2), (1, 4)]
    assert {layout.micro_batch_size for layout in layouts} == {8}


@pytest.mark.parametrize(
    ("world", "remedy"), [(1, "start 4 processes"), (6, "start 4 or 8 processes"), (0, "start 4 processes")]
)
def test_world_that_does_not_divide_is_its_own_error(world: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as error:
        resolve_layout(make(tensor=2, pipeline=2), world)
    assert "global_batch_size" not in str(error.value)


def test_layout_checks_a_config_that_was_not_loaded() -> None:
    with pytest.raises(ConfigError, match=r"does not divide model\.num_heads = 12"):
        resolve_layout(make(tensor=5), 5)


def test_zero_stage_is_an_integer_in_a_loaded_config_and_in_the_layout() -> None:
    assert load_config(None).parallel.zero_stage == 0
    assert resolve_layout(load_config(None, {"parallel.zero_stage": 3}), 2).zero_stage == 3
    assert resolve_layout(Config(), 1).zero_stage == 0
