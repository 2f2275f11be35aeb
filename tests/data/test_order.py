"""The stream of samples: every epoch complete, whatever the seed, the position and the batch size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megadiff.data.order import SampleOrder, check_enough_samples, stream_index
from megadiff.errors import DataError
from megadiff.ops.philox import permutation


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**63 - 1), n=st.integers(1, 50), epoch=st.integers(0, 2**20))
def test_each_epoch_holds_every_sample_once_in_the_order_of_its_permutation(seed: int, n: int, epoch: int) -> None:
    positions = torch.arange(epoch * n, (epoch + 1) * n)
    indices = SampleOrder(seed, n).indices(positions)
    assert sorted(indices.tolist()) == list(range(n))
    assert torch.equal(indices, permutation(seed, epoch, n))


@settings(deadline=None, max_examples=30)
@given(start=st.integers(0, 100), cuts=st.lists(st.integers(1, 17), min_size=1, max_size=10))
def test_b07_epoch_boundaries_drop_and_pad_nothing_however_the_stream_is_cut(start: int, cuts: list[int]) -> None:
    order, pieces, position = SampleOrder(3, 10), [], start
    for length in cuts:
        pieces.append(order.indices(torch.arange(position, position + length)))
        position += length
    whole = [stream_index(k, 3, 10) for k in range(start, position)]
    assert torch.cat(pieces).tolist() == whole


def test_seeds_and_epochs_give_different_orders() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return SampleOrder(seed, 100).indices(torch.arange(100 * number, 100 * (number + 1))).tolist()

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 0) != list(range(100))


def test_far_positions_are_reached_without_walking_there() -> None:
    assert 0 <= stream_index(10**12 + 7, 0, 1000) < 1000


@pytest.mark.parametrize("num_samples", [0, 1, 7])
def test_b07_fewer_samples_than_a_global_batch_names_both_numbers(num_samples: int) -> None:
    with pytest.raises(DataError, match=rf"{num_samples} samples.*global_batch_size = 8"):
        check_enough_samples(num_samples, 8)


def test_b07_exactly_a_global_batch_is_enough() -> None:
    check_enough_samples(8, 8)
    check_enough_samples(9, 8)


def test_a_stream_over_nothing_is_refused() -> None:
    with pytest.raises(DataError, match=r"0 samples"):
        SampleOrder(0, 0)
