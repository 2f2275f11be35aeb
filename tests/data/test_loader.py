"""Steps on every layout come from one stream; errors and threads of the reader reach the user and end."""

import gc
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megadiff.data.augment import Augmentation
from megadiff.data.batch import Batch
from megadiff.data.ids import IdDataset
from megadiff.data.loader import THREAD_NAME, BatchLoader
from megadiff.data.order import stream_index
from megadiff.errors import ConfigError, DataError

SEED = 11


def make_loader(
    num_samples: int,
    global_batch: int,
    micro: int,
    rank: int = 0,
    degree: int = 1,
    start: int = 0,
    **rest: int,
) -> BatchLoader:
    dataset = IdDataset(num_samples, num_classes=4, in_channels=1, input_size=2)
    prefetch = rest.get("prefetch", 0)
    return BatchLoader(dataset, SEED, global_batch, micro, rank, degree, prefetch, start)


def global_stream(num_samples: int, layout: tuple[int, int, int], start: int, steps: int) -> list[tuple[int, int]]:
    """Return (sample id, data set index decoded from the pixels) of all ranks, by sample id."""
    micro, degree, accumulation = layout
    seen: list[tuple[int, int]] = []
    dataset = IdDataset(num_samples, 4, 1, 2)
    for rank in range(degree):
        loader = make_loader(num_samples, micro * degree * accumulation, micro, rank, degree, start)
        for _ in range(steps):
            batches = next(loader)
            assert len(batches) == accumulation
            for batch in batches:
                assert batch.images.shape == (micro, 1, 2, 2)
                seen += zip(batch.sample_ids.tolist(), dataset.decode(batch.images).tolist(), strict=True)
    return sorted(seen)


layouts = st.sampled_from([1, 2, 3, 4, 6, 12]).flatmap(
    lambda micro: st.sampled_from([d for d in (1, 2, 3, 4, 6, 12) if 12 % (micro * d) == 0]).map(
        lambda degree: (micro, degree, 12 // (micro * degree))
    )
)


@settings(deadline=None, max_examples=40)
@given(layout=layouts, num_samples=st.integers(12, 40), start=st.integers(0, 200), steps=st.integers(1, 4))
def test_b21_every_layout_reads_the_same_global_stream(
    layout: tuple[int, int, int], num_samples: int, start: int, steps: int
) -> None:
    expected = [(k, stream_index(k, SEED, num_samples)) for k in range(start, start + 12 * steps)]
    assert global_stream(num_samples, layout, start, steps) == expected


def test_micro_batches_hold_the_positions_of_the_contract() -> None:
    loader = make_loader(num_samples=64, global_batch=16, micro=2, rank=1, degree=2, start=100)
    ids = [batch.sample_ids.tolist() for batch in next(loader)]
    assert ids == [[108, 109], [110, 111], [112, 113], [114, 115]]
    assert loader.position == 116


def test_b21_an_epoch_that_changes_its_data_parallel_size_at_sample_37_sees_every_sample_once() -> None:
    indices = []
    for start, stop, degree in ((0, 37, 1), (37, 61, 4), (61, 100, 3)):
        width = stop - start if degree == 1 else (stop - start) // degree
        for rank in range(degree):
            (batch,) = next(make_loader(100, width * degree, width, rank, degree, start))
            indices += batch.indices.tolist()
    assert sorted(indices) == list(range(100))


def test_b20_three_short_runs_equal_one_long_run_in_positions_and_samples() -> None:
    def run(start: int, steps: int, prefetch: int) -> tuple[list[int], int]:
        with make_loader(50, 8, 4, start=start, prefetch=prefetch) as loader:
            ids = [k for _ in range(steps) for batch in next(loader) for k in batch.indices.tolist()]
            return ids, loader.position

    whole, end = run(0, 30, prefetch=0)
    pieces, position = [], 0
    for steps in (10, 10, 10):
        ids, position = run(position, steps, prefetch=3)
        pieces += ids
    assert pieces == whole
    assert position == end == 240


def test_position_counts_consumed_samples_not_those_read_ahead() -> None:
    with make_loader(50, 8, 4, prefetch=4) as loader:
        assert loader.position == 0
        next(loader)
        time.sleep(0.2)
        assert loader.position == 8


@pytest.mark.parametrize("num_samples", [0, 1, 7])
def test_b07_a_data_set_smaller_than_a_global_batch_is_refused_with_both_numbers(num_samples: int) -> None:
    with pytest.raises(DataError, match=rf"{num_samples} samples.*global_batch_size = 8"):
        make_loader(num_samples, 8, 4)


@pytest.mark.parametrize("num_samples", [8, 9])
def test_b07_from_a_global_batch_on_every_batch_is_full(num_samples: int) -> None:
    loader = make_loader(num_samples, 8, 4)
    assert [len(batch.labels) for _ in range(5) for batch in next(loader)] == [4] * 10


def test_sizes_that_do_not_divide_are_refused_with_every_factor() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size = 12 .*micro_batch_size = 4 .*size 2"):
        make_loader(100, 12, 4, degree=2)


class FailingDataset(IdDataset):
    """Fails at one sample as an unreadable file does."""

    def __init__(self, bad_index: int, error: Exception) -> None:
        super().__init__(16, 4, 1, 2)
        self.bad_index = bad_index
        self.error = error

    def load(self, index: int) -> tuple[Tensor, int]:
        if index == self.bad_index:
            raise self.error
        return super().load(index)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("error", [DataError("cannot read the image cat/7.png"), KeyError("a bug")])
def test_b31_an_error_reaches_the_consumer_at_its_step_and_stays(prefetch: int, error: Exception) -> None:
    dataset = FailingDataset(stream_index(9, SEED, 16), error)
    with BatchLoader(dataset, SEED, 4, 4, prefetch_batches=prefetch) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                next(loader)
            assert caught.value is error
        assert loader.position == 8


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def wait_until_no_data_threads() -> None:
    deadline = time.monotonic() + 5
    while data_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not data_threads()


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    loader = make_loader(50, 8, 4, prefetch=2)
    next(loader)
    assert data_threads()
    loader.close()
    assert not data_threads()
    loader.close()
    with pytest.raises(RuntimeError, match=r"closed"):
        next(loader)


def test_a_forgotten_loader_leaves_no_thread() -> None:
    loader = make_loader(50, 8, 4, prefetch=2)
    next(loader)
    del loader
    gc.collect()
    wait_until_no_data_threads()


def test_a_failed_loader_leaves_no_thread() -> None:
    loader = BatchLoader(FailingDataset(0, DataError("bad")), SEED, 16, 16)
    with pytest.raises(DataError):
        next(loader)
    wait_until_no_data_threads()


class RampDataset(IdDataset):
    """Pictures that differ from their mirror image."""

    def load(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([[[index, -1.0]]]), 0


def flips_by_sample(micro: int, degree: int) -> dict[int, bool]:
    flips = {}
    for rank in range(degree):
        loader = BatchLoader(
            RampDataset(64, 1, 1, 2), SEED, 64, micro, rank, degree, 0, 128, augmentation=Augmentation(flip=True)
        )
        for batch in next(loader):
            mirrored = batch.images[:, 0, 0, 0] == -1.0
            flips.update(zip(batch.sample_ids.tolist(), mirrored.tolist(), strict=True))
    return flips


def test_flips_are_decided_by_the_sample_on_every_layout() -> None:
    one_rank = flips_by_sample(64, 1)
    assert one_rank == flips_by_sample(4, 4) == flips_by_sample(1, 2)
    assert 16 < sum(one_rank.values()) < 48


def test_a_picture_is_not_flipped_in_the_same_way_in_every_epoch() -> None:
    loader = BatchLoader(
        RampDataset(64, 1, 1, 2), SEED, 64, 64, prefetch_batches=0, augmentation=Augmentation(flip=True)
    )
    by_epoch = []
    for _ in range(2):
        (batch,) = next(loader)
        by_epoch.append(dict(zip(batch.indices.tolist(), (batch.images[:, 0, 0, 0] == -1.0).tolist(), strict=True)))
    assert by_epoch[0] != by_epoch[1]


def test_a_batch_moves_all_its_tensors() -> None:
    batch = Batch(torch.zeros(1, 1, 2, 2), torch.zeros(1).long(), torch.zeros(1).long(), torch.ones(1, 1, 2, 2))
    moved = batch.to("meta")
    assert moved.mask is not None
    assert {moved.images.device.type, moved.labels.device.type, moved.mask.device.type} == {"meta"}
    assert moved.indices is None
