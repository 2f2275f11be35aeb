"""Schedules as data: complete, in an order that can run, and refused where they cannot exist."""

import pytest

from megadiff.errors import PlanError
from megadiff.parallel.program import Exchange, Pass, Program
from megadiff.parallel.schedules import Schedule, build_program

RANKS = [1, 2, 4, 5]
STAGES_PER_RANK: dict[Schedule, int] = {
    "gpipe": 1, "1f1b": 1, "folded": 2, "interleaved": 3, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipev": 2,
}  # fmt: skip


def programs(schedule: Schedule, num_ranks: int, micro_batches: int) -> Program:
    return build_program(schedule, STAGES_PER_RANK[schedule] * num_ranks, num_ranks, micro_batches)


def passes(program: Program) -> list[tuple[int, Pass]]:
    return [(rank, step) for rank, steps in enumerate(program.steps) for step in steps if isinstance(step, Pass)]


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_every_stage_passes_every_micro_batch_once_on_its_rank(schedule: Schedule, num_ranks: int, factor: int) -> None:
    micro_batches = factor * num_ranks
    program = programs(schedule, num_ranks, micro_batches)
    found = passes(program)
    assert all(program.rank_of_stage[step.stage] == rank for rank, step in found)
    parts = {"forward": {"forward"}, "backward": {"input_gradient", "weight_gradient"}}
    work = [(kind, step) for _, step in found for kind in parts.get(step.kind, {step.kind})]
    expected = {
        (kind, stage, micro_batch)
        for kind in ("forward", "input_gradient", "weight_gradient")
        for stage in range(STAGES_PER_RANK[schedule] * num_ranks)
        for micro_batch in range(micro_batches)
    }
    assert len(work) == len(expected)
    assert {(kind, step.stage, step.micro_batch) for kind, step in work} == expected


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_what_deepspeed_sends_somebody_receives(schedule: Schedule, num_ranks: int) -> None:
    """And nothing is exchanged between two stages of one rank."""
    program = programs(schedule, num_ranks, 2 * num_ranks)
    exchanges = [
        (rank, step) for rank, steps in enumerate(program.steps) for step in steps if isinstance(step, Exchange)
    ]
    sends = sorted(message for _, step in exchanges for message in step.sends)
    receives = sorted(message for _, step in exchanges for message in step.receives)
    assert sends == receives
    assert len(set(sends)) == len(sends)
    crossings = sum(a != b for a, b in zip(program.rank_of_stage, program.rank_of_stage[1:], strict=False))
    assert len(sends) == 2 * crossings * 2 * num_ranks


def test_a_folded_pipeline_puts_mirrored_stages_on_one_rank() -> None:
    assert programs("folded", 3, 6).rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert programs("interleaved", 2, 4).rank_of_stage == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "micro_batches", "message"),
    [
        ("folded", 4, 2, 3, "needs at least 4 micro-batches, got 3"),
        ("folded", 2, 2, 4, "needs 4 stages, got 2"),
        ("dualpipev", 4, 2, 3, "needs at least 4 micro-batches, got 3"),
        ("zb-v", 2, 2, 4, "needs 4 stages, got 2"),
        ("1f1b", 4, 2, 4, "needs 2 stages, got 4"),
        ("interleaved", 2, 2, 4, "needs a multiple of 2 and at least 4 stages, got 2"),
        ("interleaved", 4, 2, 3, "needs a multiple of 2 micro-batches, got 3"),
        ("gpipe", 0, 0, 4, "use at least 1 of each"),
        ("gpipe", 1, 1, 0, "use at least 1 of each"),
    ],
)
def test_impossible_numbers_are_refused(
    schedule: Schedule, stages: int, ranks: int, micro_batches: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        build_program(schedule, stages, ranks, micro_batches)
