"""A network is a backbone that makes features and a head that makes scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Backbone(nn.Module):
    """What every backbone says about itself. Names are dotted paths of submodules, shallow to deep."""

    out_features: int
    """Length of a feature vector, or channels of a feature map: what the head takes in."""
    stages: tuple[str, ...]
    """Submodules whose outputs may be tapped."""
    taps: tuple[str, ...]
    """The stages that cross-layer alignment compares unless told otherwise."""
    classifier_key: str = ""
    """Where published checkpoints of this net keep their final linear layer, or nothing."""
    unused_keys: tuple[str, ...] = ()
    """Prefixes of layers that published checkpoints have and this backbone leaves out."""


class Network(nn.Module):
    """Raw inputs to scores.

    Inputs are images `(B, 3, H, W)` with values in [0, 1], or table rows `(B, D)` with NaN for missing.
    Scores are logits: `(B, classes)`, or `(B, classes, H, W)` when the head gives a map.
    Normalisation happens inside and is not part of the state dict, whose keys are `backbone.*` and `head.*`.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: Backbone, head: nn.Module, mean: Sequence[float], std: Sequence[float], arch: str
    ) -> None:
        super().__init__()
        self.arch = arch
        self.backbone = backbone
        self.head = head
        shape = (1, len(mean), 1, 1) if len(mean) == 3 else (1, len(mean))
        self.register_buffer("mean", torch.tensor(mean).reshape(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(shape), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        """What the head takes in: `(B, out_features)`, or `(B, out_features, h, w)` for segmentation."""
        features: Tensor = self.backbone((x - self.mean) / self.std)
        return features

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.features(x), x.shape[-2:])

    def scores(self, features: Tensor, size: Sequence[int], head: nn.Module | None = None) -> Tensor:
        """Scores from features, by another `head` where one is given; a map is enlarged to `size` = (H, W) of the
        input."""
        scores: Tensor = (head or self.head)(features)
        if scores.ndim == 4:
            scores = F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
        return scores


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Layers built inside draw their weights from `seed`; the global generator is left as it was.

    Seeds the CPU generator only: `torch.manual_seed` would also reset the generators of every GPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
