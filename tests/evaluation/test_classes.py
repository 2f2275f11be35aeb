"""The inception score in closed cases."""

import math

import pytest
import torch

from megadiff.evaluation.classes import inception_score


def test_sure_and_all_different_gives_the_number_of_classes() -> None:
    logits = torch.eye(7).repeat(3, 1) * 1000
    assert inception_score(logits) == pytest.approx(7.0, rel=1e-12)


def test_all_alike_or_unsure_gives_one() -> None:
    assert inception_score(torch.tensor([[50.0, 0.0, 0.0]]).repeat(9, 1)) == pytest.approx(1.0, rel=1e-12)
    assert inception_score(torch.zeros(5, 4)) == pytest.approx(1.0, rel=1e-12)


def test_two_pictures_of_two_classes() -> None:
    """With p and 1 - p exchanged the mean is even: log 2 less the entropy of p."""
    p = 0.9
    logits = torch.tensor([[p, 1 - p], [1 - p, p]], dtype=torch.float64).log() + 3.0  # a common shift plays no part
    expected = 2 * math.exp(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert inception_score(logits) == pytest.approx(expected, rel=1e-12)
