"""Closed formulas for what methods cost, to hold against what is counted.

G is the extractor and F the classifier of a network. ||m|| are the floating-point operations of one sample's forward
pass through m, |m| how many numbers m holds, K the number of sites, W a mixture, and S what the BatchNorm layers of G
remember. After C.-H. Yao et al., Federated Multi-Target Domain Adaptation, WACV 2022, sec. 4.2.

A backward pass makes two gradients, of the weights and of the inputs, and each costs as much as the forward pass. So a
trained part costs 3||m||, a frozen one that a gradient passes through 2||m||. Nobody needs the gradient of the lowest
trained part's inputs: ||dG|| or ||dF|| is what it would have cost. The paper takes a whole backward pass for one ||m||:
`published` has its own formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from fedshift.methods.fada import domain_identifier
from fedshift.methods.transfer import DannHyper, discriminator

Terms = Mapping[str, float]
"""Symbol (G, F, KF, D, dG, dF, W, S) -> how often it is counted; KF is K times F."""


@dataclass(frozen=True)
class Formula:
    """Terms of a client's operations a training sample, and of the numbers that a site sends and gets in a round.
    None: there is no closed formula. `mixture` names the message fields, up and down, that W stands for;
    `discriminator` builds D for so many features."""

    flops: Terms | None
    upload: Terms | None
    broadcast: Terms | None
    published: Terms | None = None
    mixture: tuple[str, str] = ("", "")
    discriminator: Callable[[int], nn.Module] | None = None
    note: str = ""


MODEL: Terms = {"G": 1, "F": 1}
TRAINED: Terms = {"G": 3, "F": 3, "dG": -1}

PLAIN = Formula(TRAINED, MODEL, MODEL)
"""A site gets the network, trains it on cross-entropy and sends it back."""

DUALADAPT = Formula(
    flops={"G": 1, "F": 4, "dF": -1},
    upload={"F": 1, "W": 1, "S": 1},
    broadcast={"G": 1, "F": 1, "W": 1},
    published={"G": 1, "F": 3},
    mixture=("mixture", "source"),
    note="W is as large as the data make it: its components need samples, its axes follow the features. Broadcast, it"
    " brings the axes along. S is what the client's data leave in BatchNorm layers; the paper names no such layers. The"
    " forward pass that finds it, ||G|| a sample and round, is among the operations outside of training batches.",
)

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(
        (
            "fedavg",
            "deepall",
            "source-only",
            "single-site",
            "oracle",
            "ind-ensemble",
            "ind-paramavg",
            "sequential",
            "kd3a",
        ),
        PLAIN,
    ),
    "shot": replace(PLAIN, note="Sites take part in the first rounds only; the rest is the coordinator's work."),
    "feddg": Formula(
        flops={"G": 8, "F": 8, "dG": -3},
        upload=MODEL,
        broadcast=MODEL,
        note="Two forward passes and three backward ones: the inner step has one of its own.",
    ),
    "csac": Formula(
        flops=None,
        upload=MODEL,
        broadcast=MODEL,
        note="Calibration adds a forward pass of the site's own model where it is not kept, projections, and distances"
        " that grow with the batch: no closed formula.",
    ),
    "copa": Formula(
        # A second pass through G, judged by K - 1 frozen classifiers.
        flops={"G": 6, "F": 1, "KF": 2, "dG": -2},
        upload=MODEL,
        broadcast={"G": 1, "KF": 1},
    ),
    "copa-uda": Formula(
        flops={"G": 6, "F": 1, "KF": 2, "dG": -2},
        upload=MODEL,
        broadcast={"G": 1, "KF": 1},
        note="As counted here, where noise convinces nobody. Once the target's classifier is trained it is one more:"
        " 2||F|| and |F|.",
    ),
    "fada": Formula(
        # The gradient passes through D, the frozen domain identifier.
        flops={"G": 3, "F": 3, "D": 2, "dG": -1},
        upload=None,
        broadcast=None,
        discriminator=domain_identifier,
        note="D is the domain identifier. Sites are asked once a batch, and here they have one: a round of n batches"
        " moves n times as much.",
    ),
    "dualadapt": DUALADAPT,
    "fed-oracle": Formula(
        DUALADAPT.flops, {"F": 1, "S": 1}, {"G": 1, "F": 1}, DUALADAPT.published, note="DualAdapt without its mixtures."
    ),
    "fed-dan": Formula(
        flops={"G": 6, "F": 3, "dG": -2},
        upload=MODEL,
        broadcast=MODEL,
        published={"G": 4, "F": 2},
        note="For a target and a source sample together. The paper prints no formula: this is Fed-DANN's without D.",
    ),
    "fed-dann": Formula(
        flops={"G": 6, "F": 3, "D": 6, "dG": -2},
        upload=MODEL,
        broadcast=MODEL,
        published={"G": 4, "F": 2, "D": 4},
        discriminator=lambda features: discriminator(features, DannHyper.hidden),
        note="For a target and a source sample together. D, the discriminator, stays at its site.",
    ),
    "fed-mcd": Formula(
        # Step A trains everything on the source sample; B the classifiers on both; C, four times, G on the target.
        flops={"G": 3 + 2 + 12, "F": 6 + 12 + 16, "dG": -5, "dF": -4},
        upload={"G": 1, "F": 2},
        broadcast={"G": 1, "F": 2},
        published={"G": 4, "F": 8},
        note="For a target and a source sample together, and fed-mcd.repeats at 4. The paper counts one pass of each"
        " through everything; MCD's three steps make more.",
    ),
}


def evaluated(terms: Terms, symbols: Mapping[str, float]) -> float:
    return sum(times * symbols[symbol] for symbol, times in terms.items())


def written(terms: Terms, bar: str) -> str:
    """`3||G|| + 3||F|| - ||dG||`, with `bar` on both sides of each symbol."""
    text = ""
    for symbol, times in terms.items():
        sign = " - " if times < 0 else " + " if text else ""
        many, part = ("K", symbol[1:]) if symbol.startswith("K") else ("", symbol)
        text += f"{sign}{'' if abs(times) == 1 else f'{abs(times):g}'}{many}{bar}{part}{bar}"
    return text
