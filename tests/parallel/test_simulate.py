"""The simulated schedules against closed forms of their papers, and against what must hold for any costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadiff.errors import PlanError
from megadiff.parallel import simulate as module
from megadiff.parallel.program import Exchange, Message, Pass, Program
from megadiff.parallel.schedules import Schedule
from megadiff.parallel.simulate import Link, Simulation, StageCost, simulate
from tests.parallel.test_schedules import STAGES_PER_RANK

FREE = Link(math.inf, 0.0)
SIZES = [(1, 4), (2, 4), (2, 8), (4, 8), (4, 16), (8, 16)]
FORWARD, BACKWARD, WEIGHT = 1.0, 2.5, 1.0


def run(schedule: Schedule, ranks: int, micro_batches: int, link: Link = FREE, **changes: float) -> Simulation:
    """A pipeline of equal stages."""
    values = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT, "activation_bytes": 1, "boundary_bytes": 10}
    cost = StageCost(**{**values, **changes})
    return simulate(schedule, [cost] * STAGES_PER_RANK[schedule] * ranks, ranks, micro_batches, link)


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_of_1f1b_and_gpipe(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1), Narayanan et al. 2021, section 2.2."""
    found = run(schedule, ranks, micro_batches)
    assert found.bubble == exactly((ranks - 1) / (micro_batches + ranks - 1))
    assert found.step_seconds == exactly((micro_batches + ranks - 1) * (FORWARD + BACKWARD))


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_the_bubble_of_interleaved_stages(ranks: int, micro_batches: int) -> None:
    """(p - 1) / (v m + p - 1) for v stages a rank, Narayanan et al. 2021, section 2.2."""
    chunks = STAGES_PER_RANK["interleaved"]
    expected = (ranks - 1) / (chunks * micro_batches + ranks - 1)
    assert run("interleaved", ranks, micro_batches).bubble == exactly(expected)


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_zero_bubble_schedules(ranks: int, micro_batches: int, weight: float) -> None:
    """A rank's idle time between its first and last pass, Qi et al. 2023, table 2: B is the input's gradient alone.

    ZB-H1: (p - 1) (F + B - W); ZB-H2: (p - 1) (F + B - 2 W); on the first rank, whose passes span the most.
    """
    alone = BACKWARD - weight
    for schedule, deferred in (("zb-h1", 1), ("zb-h2", 2)):
        found = run(schedule, ranks, micro_batches, weight=weight)
        idle = max(span - busy for span, busy in zip(found.spans, found.busy, strict=True))
        assert idle == exactly((ranks - 1) * (FORWARD + alone - deferred * weight)), schedule


def test_zero_bubble_h2_has_none_where_all_parts_take_as_long() -> None:
    found = run("zb-h2", 4, 16, backward=2.0)
    assert found.spans == found.busy


@pytest.mark.parametrize(("ranks", "micro_batches"), [*SIZES, (3, 7), (5, 10), (10, 20), (12, 51)])
def test_zero_bubble_v_has_the_shortest_step_there_is_in_the_memory_of_1f1b(ranks: int, micro_batches: int) -> None:
    """The last rank cannot start before p - 1 passes of others; then no pass of it waits, as of Qi et al., section 6.

    Stages are half of 1F1B's, so 2 p of them are the p that 1F1B's first rank holds.
    """
    found = run("zb-v", ranks, micro_batches, backward=2.0)
    assert found.step_seconds == exactly(6 * micro_batches + ranks - 1)
    assert found.spans[-1] == exactly(found.busy[-1])
    assert found.peak_activations == (2 * ranks,) * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_peak_activations_of_a_rank(ranks: int, micro_batches: int) -> None:
    order = range(ranks)
    assert run("gpipe", ranks, micro_batches).peak_activations == (micro_batches,) * ranks
    assert run("1f1b", ranks, micro_batches).peak_activations == tuple(min(ranks - r, micro_batches) for r in order)
    assert run("zb-h1", ranks, micro_batches).peak_activations == (min(ranks, micro_batches),) * ranks
    # Narayanan et al. 2021: this many forwards ahead, and the one whose backward comes next.
    ahead = [2 * (ranks - r - 1) + (STAGES_PER_RANK["interleaved"] - 1) * ranks + 1 for r in order]
    assert run("interleaved", ranks, micro_batches).peak_activations == tuple(ahead)
    # 2 p + 1 half-size stages: one more than 1F1B's first rank, on every rank.
    assert run("folded", ranks, micro_batches).peak_activations == (2 * ranks + 1,) * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_a_folded_pipeline_idles_less_than_1f1b_and_defers_nothing(ranks: int, micro_batches: int) -> None:
    """Stages of half the size; DualPipeV, which defers weight gradients, has less idle time on the same order."""
    half = {"forward": FORWARD / 2, "backward": BACKWARD / 2, "weight": WEIGHT / 2}
    folded, deferring = (run(name, ranks, micro_batches, **half) for name in ("folded", "dualpipev"))
    unfolded = run("1f1b", ranks, micro_batches)
    assert folded.busy == pytest.approx(unfolded.busy)
    assert folded.step_seconds <= unfolded.step_seconds * (1 + 1e-12)
    assert deferring.step_seconds <= folded.step_seconds * (1 + 1e-12)
    if ranks > 1:
        assert deferring.step_seconds < folded.step_seconds < unfolded.step_seconds


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_bytes_cross_every_boundary_between_ranks_both_ways(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    place = {"folded": "v", "zb-v": "v", "dualpipev": "v"}.get(schedule, "round")
    stages = STAGES_PER_RANK[schedule] * ranks
    crossings = 0 if ranks == 1 else stages - (2 if place == "v" else 1)
    found = run(schedule, ranks, micro_batches)
    assert sum(found.sent_bytes) == 2 * 10 * crossings * micro_batches


def test_who_sends_the_bytes() -> None:
    """A rank sends an activation or a gradient to each neighbour; the mirrored stages of a rank send one each way."""
    assert run("1f1b", 4, 8).sent_bytes == (80, 160, 160, 80)
    assert run("folded", 4, 8).sent_bytes == (160, 320, 320, 160)
    # Boundaries of 1, 2, 3 and 0 bytes: outputs go on, gradients of the same size go back.
    stages = [StageCost(1.0, 2.0, 1.0, 1, size) for size in (1, 2, 3, 0)]
    assert simulate("1f1b", stages, 4, 1, FREE).sent_bytes == (1, 1 + 2, 2 + 3, 3)
    assert simulate("folded", stages, 2, 4, FREE).sent_bytes == (4 * (1 + 3), 4 * (1 + 3))
    assert simulate("interleaved", stages, 2, 2, FREE).sent_bytes == (2 * (1 + 2 + 3), 2 * (1 + 2 + 3))


def test_a_transfer_takes_bytes_over_bandwidth_and_latency() -> None:
    """One micro-batch through two stages: forward, message, forward, backward, message, backward."""
    found = run("1f1b", 2, 1, Link(5.0, 0.25))
    assert found.step_seconds == exactly(2 * (FORWARD + BACKWARD) + 2 * (10 / 5.0 + 0.25))


def test_messages_of_one_link_follow_each_other() -> None:
    """No pass takes time, so three activations wait for the link, and then three gradients."""
    found = run("gpipe", 2, 3, Link(1.0, 0.0), forward=0.0, backward=0.0, weight=0.0)
    assert found.step_seconds == exactly(3 * 10 + 3 * 10)


def test_an_order_that_stands_still_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that both send before they receive what the other has not posted."""
    first = (Pass("forward", 0, 0), Exchange((), (Message(True, 1, 0),)), Exchange((Message(False, 0, 0),), ()))
    second = (Exchange((), (Message(False, 0, 0),)), Pass("forward", 1, 0))
    stuck = Program((first, second), (0, 1), is_eager=False)
    monkeypatch.setattr(module, "build_program", lambda *_: stuck)
    with pytest.raises(PlanError, match=r"schedule 1f1b stands still: rank 0 waits at Exchange"):
        run("1f1b", 2, 1)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, list[StageCost], int, int, Link]:
    schedule = draw(st.sampled_from(list(STAGES_PER_RANK)))
    ranks = draw(st.integers(1, 4))
    seconds = st.floats(0.01, 10.0)
    stages = []
    for _ in range(STAGES_PER_RANK[schedule] * ranks):
        weight, rest = draw(seconds), draw(seconds)
        stages.append(
            StageCost(draw(seconds), weight + rest, weight, draw(st.integers(0, 99)), draw(st.integers(0, 99)))
        )
    link = Link(draw(st.floats(1.0, 1e4)), draw(st.floats(0.0, 1.0)))
    return schedule, stages, ranks, ranks * draw(st.integers(2, 4)), link


@given(pipelines(), st.floats(1.0, 1e4))
def test_a_faster_link_never_makes_a_step_slower(
    pipeline: tuple[Schedule, list[StageCost], int, int, Link], other: float
) -> None:
    schedule, stages, ranks, micro_batches, link = pipeline
    slow, fast = sorted((link.bytes_per_second, other))
    found = [
        simulate(schedule, stages, ranks, micro_batches, Link(bandwidth, link.latency)) for bandwidth in (slow, fast)
    ]
    assert found[1].step_seconds <= found[0].step_seconds * (1 + 1e-9)


@given(pipelines())
def test_no_step_is_faster_than_its_slowest_rank_or_its_longest_path(
    pipeline: tuple[Schedule, list[StageCost], int, int, Link],
) -> None:
    schedule, stages, ranks, micro_batches, link = pipeline
    found = simulate(schedule, stages, ranks, micro_batches, link)
    work = sum(stage.forward + stage.backward for stage in stages)
    assert sum(found.busy) == pytest.approx(micro_batches * work)
    path = sum(stage.forward + stage.backward - stage.weight for stage in stages)
    slack = 1 - 1e-9
    assert found.step_seconds >= slack * max(*found.busy, path)
    assert all(0 <= busy <= span * (1 + 1e-9) for busy, span in zip(found.busy, found.spans, strict=True))
    assert -1e-9 <= found.bubble < 1
    free = simulate(schedule, stages, ranks, micro_batches, FREE)
    assert free.step_seconds <= found.step_seconds * (1 + 1e-9)
    assert free.peak_activations == found.peak_activations
