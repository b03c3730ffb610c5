"""What methods count during a run, in words. Reports show them; every name that a method counts has to be here."""

from __future__ import annotations

from fedshift.errors import CATALOGUE

COUNTED: dict[str, str] = {
    "copa.no-other-classifiers": (
        "There was one source only: no other classifiers to collaborate with, so that this round was plain training."
    ),
    "copa-uda.fine-tuning-diverged": (
        "Training on pseudo labels gave NaN or infinite weights and was undone: a lower lr may help."
    ),
    "copa-uda.no-pseudo-labels": (
        "No pseudo label passed the threshold in this round: models counted the same and nothing was fine-tuned."
    ),
    "copa-uda.unusable-model": "A site's model gave NaN or infinite predictions and was left out of the round.",
    "fada.step-diverged": "An adversarial step gave NaN or infinite weights and was undone.",
    "fada.unusable-model": "A site's model gave NaN or infinite features and was left out of the exchange.",
    "fusion.one-site": "There was one site to fuse: the fused model is that site's own.",
    "kd3a.mmd-not-finite": (
        "BatchNorm MMD gave NaN or infinite weights and was undone: a lower kd3a.mmd_rate may help."
    ),
    "kd3a.no-batchnorm": "The network has no batch normalisation, so that there was no BatchNorm MMD.",
    "kd3a.no-teacher": "No source gave usable predictions: the model stayed as it was.",
    "kd3a.nobody-confident": (
        "No teacher passed the gate for any sample: the target learned next to nothing, and weights mean little. More"
        " rounds or a lower kd3a.gate may help."
    ),
    "kd3a.nobody-useful": "No source added to the consensus: weights went by the number of samples.",
    "kd3a.one-teacher": "There was one teacher only: it agrees with itself and has the sources' whole weight.",
    "kd3a.student-not-finite": "Distillation gave NaN or infinite weights: the student was left out of the average.",
    "kd3a.teacher-not-finite": "A source's model gave NaN or infinite predictions and was left out of the vote.",
    "refused.mixture": "A client's mixture was not usable (wrong sizes or not finite) and was left out.",
    "refused.statistics": "A client's BatchNorm statistics had a variance below 0, and its answer was left out.",
    "shot.adaptation-diverged": "Adaptation gave NaN or infinite weights and was undone: a lower lr may help.",
    "shot.no-round-to-adapt": "All rounds went into training the sources: none was left to adapt.",
    "shot.unusable-model": "A source's model gave NaN or infinite predictions and was left out.",
}

_DROPPED, _SKIPPED = "dropped.components.", "skipped."


def explain(name: str) -> str | None:
    """A sentence on a counter, or None where it is not a method's."""
    if name in COUNTED:
        return COUNTED[name]
    if name.startswith(_DROPPED):
        site = name.removeprefix(_DROPPED)
        return f"Components of the mixture of {site} had too few samples behind them and never left the client."
    site, dot, code = name.removeprefix(_SKIPPED).rpartition(".")
    if name.startswith(_SKIPPED) and dot:
        return f"{site} was left out in a round. {CATALOGUE.get(code, code)}"
    return None
