"""Closed formulas for what a method costs a site, to compare with what is counted.

Symbols: G is the extractor and F the classifier of a network, D a discriminator, W a mixture, S the statistics in the
BatchNorm layers of G, K the number of sites. ||m|| is the number of floating-point operations of one sample's forward
pass through m. |m| is how many numbers m holds. After C.-H. Yao et al., Federated Multi-Target Domain Adaptation, WACV
2022, sec. 4.2.

A backward pass computes two gradients, of the weights and of the inputs, and each costs as much as the forward pass. So
a trained part costs 3||m||, and a frozen part that a gradient passes through costs 2||m||. The gradient of the inputs
of the lowest trained part is not needed: ||dG|| or ||dF|| is what it would have cost. The paper counts a whole backward
pass as one ||m||: `published` has its formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

Terms = Mapping[str, float]
"""Symbol (G, F, KF, D, dG, dF, W, S) -> how often it is counted. KF is K times F."""


@dataclass(frozen=True)
class Formula:
    """Terms of a client's operations per training sample, and of the numbers that a site sends and receives per round.
    None: there is no closed formula. `mixture` names the message fields, up and down, that W stands for.
    `discriminator` builds D from the number of features."""

    flops: Terms | None
    upload: Terms | None
    broadcast: Terms | None
    published: Terms | None = None
    mixture: tuple[str, str] = ("", "")
    discriminator: Callable[[int], nn.Module] | None = None
    note: str = ""


MODEL: Terms = {"G": 1, "F": 1}

PLAIN = Formula({"G": 3, "F": 3, "dG": -1}, MODEL, MODEL)
"""A site receives the network, trains it on cross-entropy and sends it back."""
