"""Turns a data set and an order into steps of micro-batches for one data rank, read ahead by a thread.

The stream never depends on the layout: ranks only cut the same global batch differently.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from megadiff.data.augment import Augmentation
from megadiff.data.batch import Batch
from megadiff.data.dataset import Dataset
from megadiff.data.order import SampleOrder, check_enough_samples
from megadiff.diffusion.condition import stack_conditions
from megadiff.errors import ConfigError

THREAD_NAME = "megadiff-data"
_POLL_SECONDS = 0.1

Step = list[Batch]
Message = tuple[Step, None] | tuple[None, BaseException]


@dataclass(frozen=True)
class StepReader:
    """Reads the micro-batches of one data rank for the step that starts at a given stream position."""

    dataset: Dataset
    order: SampleOrder
    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_degree: int
    augmentation: Augmentation

    def read(self, position: int) -> Step:
        """Return the micro-batches of the step whose first sample in the global stream is `position`."""
        share = self.global_batch_size // self.data_degree
        first = position + self.data_rank * share
        starts = range(first, first + share, self.micro_batch_size)
        return [self._read_batch(torch.arange(start, start + self.micro_batch_size)) for start in starts]

    def _read_batch(self, sample_ids: Tensor) -> Batch:
        indices = self.order.indices(sample_ids)
        samples = [self.dataset.load(index) for index in indices.tolist()]
        images = torch.stack([image for image, _ in samples])
        images = self.augmentation.apply(images, self.order.seed, sample_ids)
        conditions = stack_conditions([condition for _, condition in samples])
        return Batch(images, conditions, sample_ids, indices=indices)


class BatchLoader:
    """An endless iterator over steps, each a list of the accumulation micro-batches of one data rank.

    Micro-batch j of rank d holds the positions from `position + d * global / data_degree + j * micro` on.
    A reading error is raised by the `next` that would return the step, and by every later one.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int = 0,
        data_degree: int = 1,
        prefetch_batches: int = 2,
        start_position: int = 0,
        augmentation: Augmentation | None = None,
    ) -> None:
        """Check the sizes; the thread starts with the first `next`.

        Args:
            dataset: the pictures.
            seed: decides the order and the augmentation.
            global_batch_size: samples of one step over all data ranks.
            micro_batch_size: samples of one micro-batch on one data rank.
            data_rank: coordinate on the data axis (ranks that differ in tensor or stage coordinate share it).
            data_degree: size of the data axis.
            prefetch_batches: steps to read ahead; 0 reads in the caller, without a thread.
            start_position: samples consumed before, by all ranks together; any number >= 0.
            augmentation: what happens to the pictures; None for nothing.

        Raises:
            ConfigError: the batch sizes do not divide.
            DataError: the data set is smaller than a global batch.
        """
        if global_batch_size % (micro_batch_size * data_degree) != 0:
            raise ConfigError(
                f"train.global_batch_size = {global_batch_size} is not a multiple of "
                f"train.micro_batch_size = {micro_batch_size} times the data-parallel "
                f"size {data_degree}; change one of them"
            )
        if not 0 <= data_rank < data_degree or start_position < 0:
            raise ValueError(f"data_rank = {data_rank} of {data_degree}, start_position = {start_position}")
        check_enough_samples(len(dataset), global_batch_size)
        order = SampleOrder(seed, len(dataset))
        reader = StepReader(
            dataset, order, global_batch_size, micro_batch_size, data_rank, data_degree, augmentation or Augmentation()
        )
        self._global_batch_size = global_batch_size
        self._position = start_position
        self._failure: BaseException | None = None
        self._closed = False
        self._reader = reader
        self._prefetch = _Prefetch(reader.read, global_batch_size, prefetch_batches) if prefetch_batches else None

    @property
    def position(self) -> int:
        """Samples that all ranks have consumed: the stream position at which the next step starts."""
        return self._position

    def __iter__(self) -> Iterator[Step]:
        """Return self: a loader is consumed once, from its position on."""
        return self

    def __next__(self) -> Step:
        """Return the next step and advance the position; raises what the reader raised."""
        if self._closed:
            raise RuntimeError("the loader is closed; make a new one with start_position = loader.position")
        if self._failure is not None:
            raise self._failure
        try:
            step = self._prefetch.get(self._position) if self._prefetch else self._reader.read(self._position)
        except Exception as error:
            self._failure = error
            raise
        self._position += self._global_batch_size
        return step

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice."""
        self._closed = True
        if self._prefetch is not None:
            self._prefetch.close()

    def __enter__(self) -> "BatchLoader":
        """Return self; leaving the block closes the loader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the loader."""
        self.close()


class _Prefetch:
    """Reads successive steps in a thread, which holds no reference to this object and ends with it."""

    def __init__(self, read: Callable[[int], Step], stride: int, depth: int) -> None:
        self._read = read
        self._stride = stride
        self._messages: queue.Queue[Message] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._stop.set)

    def get(self, position: int) -> Step:
        """Return the next step; the first call starts the thread at `position`."""
        if self._thread is None:
            arguments = (self._read, position, self._stride, self._messages, self._stop)
            self._thread = threading.Thread(target=_produce, args=arguments, name="megadiff-data", daemon=True)
            self._thread.start()
        step, error = self._messages.get()
        if error is not None:
            raise error
        assert step is not None
        return step

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def _produce(
    read: Callable[[int], Step],
    position: int,
    stride: int,
    messages: "queue.Queue[Message]",
    stop: threading.Event,
) -> None:
    """Put steps into the queue until told to stop, or one error and then end."""
    while not stop.is_set():
        message: Message
        try:
            message = (read(position), None)
        except BaseException as error:  # anything else would leave the consumer waiting
            message = (None, error)
        _put(messages, message, stop)
        if message[1] is not None:
            return
        position += stride


def _put(messages: "queue.Queue[Message]", message: Message, stop: threading.Event) -> None:
    """Put a message as soon as there is room, unless told to stop before."""
    while not stop.is_set():
        try:
            return messages.put(message, timeout=_POLL_SECONDS)
        except queue.Full:
            continue
