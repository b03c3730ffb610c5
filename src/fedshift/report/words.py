"""Numbers and names as a reader wants them: percent, bytes, durations, and plain words for what was counted."""

from __future__ import annotations

import math

from fedshift.errors import CATALOGUE
from fedshift.federation import kinds
from fedshift.methods.counted import explain

NOTHING = "–"


def percent(value: float | None) -> str:
    """A fraction as a percentage with one digit after the point, without its sign: `0.8123` is `81.2`."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def number(value: float | None) -> str:
    """Three significant digits: enough for a loss or a weight; whole numbers from a thousand on."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def byte_size(count: float) -> str:
    """SI units: `1530000` is `1.5 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def compact(count: int) -> str:
    """A count that fits a small cell: `9876`, `12k`, `3.4M`."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sentence_list(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`; from the seventh on they are only counted."""
    if len(names) > 6:
        return f"{', '.join(names[:5])} and {len(names) - 5} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


_METRICS = {
    "train_loss": ("Training loss", "by site"),
    "acquisition_train_loss": ("Training loss, first phase", "sites on their own, before the first fusion"),
    "weight": ("Weight of each site", "its share in the average"),
    "agreement": ("Agreement", "share of the pseudo labels that each site's model agrees with"),
    "trust": ("Trust", "mean weight of pseudo labels: how source-like a client's features are"),
    "score": ("Score of each site", "what earns a source its weight; negative: it hurts the consensus"),
    "gate": ("Confidence gate", "how sure a teacher must be to vote"),
    "voted_samples": ("Samples voted on", "at the target"),
    "unsupported_samples": ("Samples without a vote", "no teacher was sure enough"),
    "consensus_quality": ("Consensus quality", "mean over the target's samples: supporters times confidence"),
    "mmd_loss": ("BatchNorm MMD", "distance of the target's statistics from the sources'"),
    "pseudo_labels": ("Pseudo labels", "target samples whose label was certain enough"),
    "pseudo_label_share": ("Share of pseudo labels", "of the target's samples"),
    "components": ("Mixture components", "that each client sent"),
    "discrepancy": ("Discrepancy", "between a client's classifier and the shared one"),
    "align_loss": ("Alignment loss", "at the home"),
    "gap": ("Gap to the source", "as each client measures it"),
    "confusion_loss": ("Confusion loss", "of the adversary"),
    "identification_loss": ("Identification loss", "telling a source's features from the target's"),
    "discriminator_loss": ("Discriminator loss", "by site"),
    "adaptation_loss": ("Adaptation loss", "by source model"),
}
"""Numbers that methods note: a title, and what it is."""


def metric_words(name: str) -> tuple[str, str]:
    """A title and a note for a metric; an unknown `some_metric` is `Some metric`."""
    words = name.replace("_", " ").replace(".", " ").strip() or "metric"
    return _METRICS.get(name, (words[0].upper() + words[1:], ""))


def kind_meanings() -> dict[str, str]:
    """What each declared kind of release is, from the types that sites obey."""
    declared = [m for alias in vars(kinds).values() for m in getattr(alias, "__metadata__", ())]
    return {kind.name: kind.meaning for kind in declared if isinstance(kind, kinds.Kind)}


_REFUSALS = {
    "undecodable": "the bytes could not be decoded",
    "schema": "it did not have the declared fields and types",
    "count": "a count was negative or absurdly large",
    "non-finite": "it held NaN or infinite numbers",
    "keys": "its tensors had other names than the model's",
    "shape": "a tensor had another shape than the model's",
    "dtype": "a tensor had another number type than the model's",
    "norm": "the update was longer than max_update_norm allows",
    "wrong-site": "it claimed to come from another site",
    "wrong-step": "it answered another step",
    "wrong-round": "it answered another round",
    "wrong-nonce": "it was not the answer to this question",
}

_ABSENCES = {
    "late": "it had not answered by the deadline",
    "crashed": "its process ended in the middle",
    "unreachable": "it could not be reached",
}


def explain_counter(name: str) -> str:
    """One plain sentence on what a counter of a run counts."""
    group, _, reason = name.partition(".")
    if group == "refused":
        why = _REFUSALS.get(reason, reason or "a check failed")
        return f"A reply was refused at the coordinator's gate and not used: {why}."
    if group == "missing":
        return f"A site gave no answer and the round went on without it: {_ABSENCES.get(reason, reason)}."
    if group == "failed":
        why = CATALOGUE.get(reason, "").rstrip(".") or reason
        return f"A site said that its step failed ({why[:1].lower()}{why[1:]}); its own log has the details."
    if name == "clipped.updates":
        return "An update was longer than the site's policy allows and was shortened before it left the site."
    if name == "skipped.files":
        return "A file could not be read and was left out: fedshift check-data names it."
    if name == "dark.files":
        return (
            "A 16-bit image is nearly black, because it holds values of 12 bits or fewer: fedshift check-data names it."
        )
    return explain(name) or "Counted by the method itself."
