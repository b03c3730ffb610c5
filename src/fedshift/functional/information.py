"""Information maximisation, and pseudo labels from class centroids: losses and labels from inputs alone.

J. Liang, D. Hu, J. Feng: Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised
Domain Adaptation. ICML 2020, sec. 3.2 and 3.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def entropy(scores: Tensor) -> Tensor:
    """L_ent: the mean over samples of the entropy of softmax(scores), for logits `(B, C)`, as a scalar."""
    log_p = F.log_softmax(scores.float(), dim=1)
    return -(log_p.exp() * log_p).sum(dim=1).mean()


def diversity(scores: Tensor) -> Tensor:
    """L_div: minus the entropy of the mean of softmax(scores) over the batch `(B, C)`, as a scalar. Its minimum, -log
    C, is reached when all classes are predicted equally often."""
    mean = scores.float().softmax(dim=1).mean(dim=0)
    # p log p is 0 at p = 0, but its gradient is infinite there.
    return (mean * mean.clamp(min=torch.finfo(mean.dtype).tiny).log()).sum()


def centroid_labels(features: Tensor, probabilities: Tensor) -> Tensor:
    """Each sample's class by the nearest centroid in cosine distance, `(N,)` int64.

    `features` are `(N, D)`, `probabilities` `(N, C)`. The first centroids are means of features weighted by
    probability; the second ones are means of the samples nearest to each first centroid. A class without samples is
    never assigned.
    """
    first = _nearest(features, probabilities)  # Eq. (4), (5)
    return _nearest(features, F.one_hot(first, probabilities.shape[1]).to(features.dtype))  # Eq. (6)


def _nearest(features: Tensor, belonging: Tensor) -> Tensor:
    """The class whose centroid, the mean of `features` weighted by `belonging` `(N, C)`, is nearest to each sample."""
    total = belonging.sum(dim=0)
    centroids = belonging.T @ features / total.clamp(min=torch.finfo(total.dtype).tiny)[:, None]
    similarity = F.normalize(features, dim=1) @ F.normalize(centroids, dim=1).T
    return similarity.masked_fill(total == 0, -torch.inf).argmax(dim=1)
