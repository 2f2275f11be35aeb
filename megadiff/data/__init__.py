"""Where the training pictures come from and in which order. Ranks are plain numbers here."""

from megadiff.data.batch import Batch
from megadiff.data.dataset import Dataset
from megadiff.data.loader import BatchLoader
from megadiff.data.order import SampleOrder, stream_index
from megadiff.data.sources import open_dataset

__all__ = ["Batch", "BatchLoader", "Dataset", "SampleOrder", "open_dataset", "stream_index"]
