"""What the classes that a classifier sees in pictures say about them."""

import torch
from torch import Tensor


def inception_score(logits: Tensor) -> float:
    """exp of the mean divergence of p(y|x) from p(y) (Salimans et al. 2016, section 4): sure of each, and all differ.

    Between 1 and K, over the whole set at once. Published figures average ten parts of 5,000 pictures in random order,
    which gives a little less.

    Args:
        logits: (N, K).
    """
    log_each = logits.double().log_softmax(1)
    log_all = log_each.logsumexp(0) - torch.log(torch.tensor(float(len(logits)), dtype=torch.float64))
    return float((log_each.exp() * (log_each - log_all)).sum(1).mean().exp())
