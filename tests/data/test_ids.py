"""The id data set carries the index of a sample in its pixels."""

import torch

from megadiff.data.ids import IdDataset


def test_pixels_decode_to_the_index_and_labels_cycle() -> None:
    dataset = IdDataset(num_samples=100_000, num_classes=7, in_channels=3, input_size=2)
    indices = [0, 1, 49_999, 50_000, 99_998, 99_999]
    samples = [dataset.load(index) for index in indices]
    images = torch.stack([image for image, _ in samples])
    assert images.shape == (6, 3, 2, 2)
    assert images.dtype == torch.float32
    assert images.min() == -1.0 and images.max() == 1.0
    assert dataset.decode(images).tolist() == indices
    assert [label for _, label in samples] == [index % 7 for index in indices]


def test_a_single_sample_decodes() -> None:
    dataset = IdDataset(1, 1, 1, 2)
    assert dataset.decode(dataset.load(0)[0][None]).tolist() == [0]
