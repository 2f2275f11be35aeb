"""Can a simple classifier, fitted on real pictures, tell the classes of the samples? Needs the extra `demo`.

A logistic regression on pixels, with balanced class weights. Samples are as recognisable as real pictures when its
balanced accuracy on them comes near that on real pictures which were held out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megadiff.errors import DataError


@dataclass(frozen=True)
class Recognition:
    """Balanced accuracies (mean recall over the classes), averaged over random splits.

    Attributes:
        real: on real pictures that the classifier did not see.
        samples: on generated pictures.
        recall: of each class on the samples.
    """

    real: float
    samples: float
    recall: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How much of the accuracy on real pictures the samples reach."""
        return self.samples / self.real


def recognise(
    real: Tensor, real_labels: Sequence[int], samples: Tensor, sample_labels: Sequence[int], num_splits: int = 5
) -> Recognition:
    """Fits on 70 % of the real pictures and scores the other 30 % and the samples.

    Args:
        real: (N, C, H, W) in [-1, 1]; at least two of every class.
        real_labels: class of each.
        samples: (M, C, H, W) in [-1, 1].
        sample_labels: the class that each was made for.
        num_splits: how many random splits are averaged.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import recall_score
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(f"judging samples needs scikit-learn ({error}); pip install 'megadiff[demo]'") from error

    pixels, fakes = _pixels(real), _pixels(samples)
    labels, made_for = np.asarray(real_labels), np.asarray(sample_labels)
    scores, recalls = [], []
    for split in range(num_splits):
        fit, held = train_test_split(np.arange(len(labels)), test_size=0.3, stratify=labels, random_state=split)
        model = LogisticRegression(C=0.01, class_weight="balanced", max_iter=500).fit(pixels[fit], labels[fit])
        scores.append(recall_score(labels[held], model.predict(pixels[held]), average="macro"))
        recalls.append(recall_score(made_for, model.predict(fakes), average=None))
    recall = np.mean(recalls, axis=0)
    return Recognition(float(np.mean(scores)), float(recall.mean()), tuple(float(value) for value in recall))


def _pixels(images: Tensor) -> np.ndarray:
    return images.clamp(-1, 1).flatten(1).to(torch.float32).cpu().numpy()
