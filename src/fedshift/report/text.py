"""Numbers and names as text: percent, bytes, durations, titles of metrics, sentences for counters."""

from __future__ import annotations

import math

from fedshift.errors import CATALOGUE
from fedshift.federation import releases
from fedshift.federation.admission import UNKNOWN_CODE
from fedshift.methods import explain

NOTHING = "–"
"""Shown in place of a number that is missing or not finite."""
SCORE_NAMES = {"accuracy": "accuracy", "miou": "mIoU"}
"""How the metric that is a run's score is written."""


def percent(value: float | None) -> str:
    """A fraction as a percentage with one decimal and no % sign: `0.8123` is `81.2`."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def number(value: float | None) -> str:
    """Three significant digits; from a thousand on, whole numbers."""
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
    """`0.4 s`, `41 s`, `3 min 12 s`, `1 h 04 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if 0 < seconds < 0.05:
        return "< 0.1 s"
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
    """`a`, `a and b`, `a, b and c`. Of more than six names, five are listed and the rest counted."""
    if len(names) > 6:
        return f"{', '.join(names[:5])} and {len(names) - 5} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


_METRICS = {
    "train_loss": ("Training loss", "by site"),
    "shared_train_loss": ("Training loss, first phase", "one classifier for all sites, without judges"),
    "acquisition_train_loss": ("Training loss, first phase", "each site alone, before the first fusion"),
    "weight": ("Weight of each site", "its share in the average"),
    "agreement": ("Agreement", "share of the pseudo labels that each site's model agrees with"),
    "trust": ("Trust", "mean weight of pseudo labels: how source-like a client's features are"),
    "score": ("Score of each site", "a source's weight follows from it; negative: it hurts the consensus"),
    "gate": ("Confidence gate", "the confidence that a teacher needs to vote"),
    "voted_samples": ("Samples voted on", "at the target"),
    "unsupported_samples": ("Samples without a vote", "no teacher was confident enough"),
    "consensus_quality": ("Consensus quality", "mean over the target's samples: supporters times confidence"),
    "mmd_loss": ("BatchNorm MMD", "distance of the target's statistics from the sources'"),
    "pseudo_labels": ("Pseudo labels", "target samples with a confident label"),
    "pseudo_label_share": ("Share of pseudo labels", "of the target's samples"),
    "components": ("Mixture components", "sent by each client"),
    "discrepancy": ("Discrepancy", "between a client's classifier and the shared one"),
    "disagreement": (
        "Disagreement",
        "of a client's classifier and the shared one, by class",
    ),
    "align_loss": ("Alignment loss", "at the home"),
    "gap": ("Gap to the source", "as each client measures it"),
    "confusion_loss": ("Confusion loss", "of the adversary"),
    "identification_loss": ("Identification loss", "of telling a source's features from the target's"),
    "discriminator_loss": ("Discriminator loss", "by site"),
    "adaptation_loss": ("Adaptation loss", "by source model"),
}
"""Metrics that methods log: a title and a note."""


def metric_title(name: str) -> tuple[str, str]:
    """A title and a note for a metric. An unknown `some_metric` is `Some metric`."""
    title = name.replace("_", " ").replace(".", " ").strip() or "metric"
    return _METRICS.get(name, (title[0].upper() + title[1:], ""))


def kind_meanings() -> dict[str, str]:
    """Kind of release -> its meaning, from the types that sites obey."""
    declared = [m for alias in vars(releases).values() for m in getattr(alias, "__metadata__", ())]
    return {kind.name: kind.meaning for kind in declared if isinstance(kind, releases.Kind)}


_REFUSALS = {
    "undecodable": "the bytes could not be decoded",
    "schema": "it did not have the declared fields and types",
    "unreadable": "the gate stumbled over it, which is an error of fedshift's: please report it",
    "size": "it was larger than any reply to that question can be",
    "seconds": "the time it said it took is no time",
    "count": "a count was negative, or larger than what the site says it has",
    "metric": "a loss or score was absurdly large",
    "variance": "a variance was below 0",
    "range": "a number was outside of what the method can have measured",
    "confusion": "its scores were not of all samples of the split, each counted once",
    "mixture": "its mixture was not usable (wrong sizes, variances, or counts)",
    "facts": "what it said of its data was incomplete or contradicted itself",
    "text": "a name in it was too long or held control characters",
    "non-finite": "it held NaN or infinite numbers",
    "keys": "its tensors did not have the names of the model's",
    "shape": "a tensor did not have the shape of the model's",
    "dtype": "a tensor did not have the number type of the model's",
    "norm": "the update was larger than max_update_norm allows",
    "wrong-site": "it claimed to come from another site",
    "wrong-step": "it answered another step",
    "wrong-round": "it answered another round",
    "wrong-nonce": "it did not answer this question",
}

_ABSENCES = {
    "late": "it did not answer before the deadline",
    "crashed": "its process ended during the step",
    "unreachable": "it could not be reached",
    "refused": "it could not read the question",
}


_ROBUST = {
    "clipped": "an update was far longer than the others and counted less (aggregation: clipped)",
    "left-out": "a model was far from the others or pointed against them: left out (aggregation: krum, aligned)",
    "count": "it stated far more samples than the others, and its weight was limited",
    "negative-variance": "its model had running variances below 0, which were set to 0",
}
_UNGUARDED = (
    "Models were averaged without a limit on the length of updates: the method does not say what model all sites"
    " started from (`since` of `fed.average`)."
)


def explain_counter(name: str) -> str:
    """One sentence on what a counter of a run counts."""
    group, _, reason = name.partition(".")
    if group == "refused":
        why = _REFUSALS.get(reason, reason or "a check failed")
        return f"A reply was refused at the coordinator's gate and not used: {why}."
    if group == "missing":
        return f"A site gave no answer and the round continued without it: {_ABSENCES.get(reason, reason)}."
    if group == "failed":
        why = CATALOGUE.get(reason, "").rstrip(".") or reason
        if reason == UNKNOWN_CODE:
            why = "with a code that fedshift does not have"
        return f"A step failed at a site ({why[:1].lower()}{why[1:]}); the site's log has the details."
    if group == "robust":
        what, _, site = reason.partition(".")
        if what == "unguarded":
            return _UNGUARDED
        return (
            f"{site or 'A site'}: {_ROBUST.get(what, what)}. Once or twice says little; in every round, ask the site."
        )
    if name == "secure.lost-sums":
        return "A site dropped out of a secure sum, so the round ended with the model that it began with."
    if name == "secure.wrong-sums":
        return "What a site put into a secure sum was beyond what it may be, so the round ended with the model before."
    if name == "clipped.updates":
        return "An update was larger than the site's policy allows and was clipped before it left the site."
    if name == "skipped.files":
        return "A file could not be read and was left out. fedshift check-data names it."
    if name == "dark.files":
        return "A 16-bit image is nearly black because it uses 12 bits or fewer. fedshift check-data names it."
    return explain(name) or "Counted by the method itself."
