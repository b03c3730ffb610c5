"""`fedshift estimate`: what to expect of a run's method at a site that nobody has seen, from leaving out each in turn.

The run is trained again without each of its labelled sites, and scored there. The scores at these sites say what a
further one may be like, if it differs from them as they differ from each other; the target's labels take no part.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, InputError
from fedshift.files import read_json, write_atomically
from fedshift.runs.api import Run
from fedshift.runs.calibrated import calibration_of
from fedshift.runs.config import make_config, read_config
from fedshift.runs.execute import run as train

FEWEST = 3
"""Sites: leaving one out of two would train on one."""
FILE = "estimate.json"


@dataclass(frozen=True)
class Estimate:
    """`left_out`: the score at each site by a model that has not learned from it. `mean` of them, and the 95 %
    prediction `interval` for one more site. `validation`: the mean over sites that were learned from, which is more
    than a new site can expect."""

    left_out: dict[str, float]
    mean: float
    interval: tuple[float, float]
    validation: float
    unit: str
    overconfidence: dict[str, float] = field(default_factory=dict)
    """At sites that were left out: the mean confidence minus the accuracy, where probabilities were calibrated."""

    def lines(self) -> list[str]:
        low, high = self.interval
        shown = ", ".join(f"{site} {100 * score:.1f}" for site, score in self.left_out.items())
        gaps = self.overconfidence.values()
        over = f"; their confidence is {100 * statistics.fmean(gaps):+.1f} points off there" if gaps else ""
        return [
            f"left out in turn: {shown} (%)",
            f"expected {self.unit} at an unseen site: {100 * self.mean:.1f} % (one more such site, 95 %:"
            f" {100 * low:.0f}-{100 * high:.0f} %){over}",
            f"validation at the sites themselves is {100 * self.validation:.1f} %: more than a new site can expect",
        ]


def prediction_interval(scores: list[float]) -> tuple[float, float]:
    """Where one more value of the same normal distribution lies in 95 of 100 cases, within 0 and 1."""
    from scipy.stats import t  # Slow to import, and needed here only.

    count = len(scores)
    spread = float(t.ppf(0.975, count - 1)) * statistics.stdev(scores) * math.sqrt(1 + 1 / count)
    centre = statistics.fmean(scores)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def overconfidence(results: Mapping[str, Any], site: str) -> float | None:
    """The mean confidence at a site minus the accuracy there, from what the run has counted; None if it has not."""
    found = calibration_of(results).targets.get(site)
    counts = found.after.parts if found else []
    total = sum(wrong + right for wrong, right in counts)
    if not total:
        return None
    sure = sum((wrong + right) * (part + 0.5) / len(counts) for part, (wrong, right) in enumerate(counts)) / total
    return sure - sum(right for _, right in counts) / total


def left_out_gaps(run: Run) -> list[float]:
    """What `estimate` found of this very model's confidence at sites that were left out; empty if it was not run."""
    file = run.path.with_name(f"{run.path.name}-left-out") / FILE
    try:
        told = read_json(file) if file.exists() else {}
        if told.get("run_model_sha256") != run.results["model_sha256"]:
            return []
        gaps = [float(gap) for gap in told["overconfidence"].values()]
        return gaps if all(-1 <= gap <= 1 for gap in gaps) else []
    except (FedshiftError, AttributeError, KeyError, TypeError, ValueError):
        return []


def estimate_run(
    run: Path | str, out: Path | str | None = None, *, say: Callable[[str], None] = lambda text: None
) -> Estimate:
    """Trains the finished run again without each of its labelled sites, in folders below `out` (default: beside the
    run). Called again, it goes on where it was stopped."""
    finished = Run(run)
    results, config = finished.results, make_config(read_config(finished.directory.config, "run-corrupt"))
    sites = sorted(results["sources"])
    if results["setting"] != "generalize":
        raise InputError(
            "method-needs", f"an unseen site is for generalize, and this run's setting is {results['setting']}"
        )
    if len(sites) < FEWEST:
        raise InputError(
            "method-needs", f"leaving sites out needs {FEWEST} labelled sites, and the run has {len(sites)}"
        )
    folder = Path(out) if out is not None else finished.path.with_name(f"{finished.path.name}-left-out")
    headline = "accuracy" if results["task"] == "classification" else "miou"
    scores, gaps = {}, {}
    for number, site in enumerate(sites, start=1):
        say(f"{number} of {len(sites)}: training without {site}")
        others = tuple(name for name in sites if name != site)
        again = config.model_copy(update={"sources": others, "target": site, "evaluate_every": config.rounds})
        found = train(again, folder / site, resume=(folder / site / "config.yaml").exists())
        if site not in found["per_target"]:
            raise InputError("data-labels", f"{site} has no labels in a test split: it cannot be left out")
        scores[site] = found["per_target"][site]["last"]
        if (gap := overconfidence(found, site)) is not None:
            gaps[site] = gap
    values = list(scores.values())
    validation = results["source_val"]
    known = statistics.fmean(validation.values()) if validation else math.nan
    made = Estimate(scores, statistics.fmean(values), prediction_interval(values), known, headline, gaps)
    told: dict[str, Any] = {
        "overconfidence": gaps,
        "run_model_sha256": results["model_sha256"],
        "left_out": made.left_out,
        "mean": made.mean,
        "interval": list(made.interval),
        "unit": made.unit,
    }
    write_atomically(folder / FILE, (json.dumps(told, indent=2) + "\n").encode())
    return made
