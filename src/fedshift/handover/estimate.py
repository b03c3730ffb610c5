"""`fedshift estimate`: what to expect of a run's method at a site that nobody has seen, from leaving out each in turn.

The run is trained again without each of its labelled sites, and scored there. The scores at these sites say what a
further one may be like, if it differs from them as they differ from each other; the target's labels take no part.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedshift.errors import InputError
from fedshift.files import write_atomically
from fedshift.runs.api import Run
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

    def lines(self) -> list[str]:
        low, high = self.interval
        shown = ", ".join(f"{site} {100 * score:.1f}" for site, score in self.left_out.items())
        return [
            f"left out in turn: {shown} (%)",
            f"expected {self.unit} at an unseen site: {100 * self.mean:.1f} % (one more such site, 95 %:"
            f" {100 * low:.0f}-{100 * high:.0f} %)",
            f"validation at the sites themselves is {100 * self.validation:.1f} %: more than a new site can expect",
        ]


def prediction_interval(scores: list[float]) -> tuple[float, float]:
    """Where one more value of the same normal distribution lies in 95 of 100 cases, within 0 and 1."""
    from scipy.stats import t  # Slow to import, and needed here only.

    count = len(scores)
    spread = float(t.ppf(0.975, count - 1)) * statistics.stdev(scores) * math.sqrt(1 + 1 / count)
    centre = statistics.fmean(scores)
    return max(0.0, centre - spread), min(1.0, centre + spread)


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
    scores = {}
    for number, site in enumerate(sites, start=1):
        say(f"{number} of {len(sites)}: training without {site}")
        others = tuple(name for name in sites if name != site)
        again = config.model_copy(update={"sources": others, "target": site, "evaluate_every": config.rounds})
        found = train(again, folder / site, resume=(folder / site / "config.yaml").exists())
        if site not in found["per_target"]:
            raise InputError("data-labels", f"{site} has no labels in a test split: it cannot be left out")
        scores[site] = found["per_target"][site]["last"]
    values = list(scores.values())
    validation = results["source_val"]
    known = statistics.fmean(validation.values()) if validation else math.nan
    made = Estimate(scores, statistics.fmean(values), prediction_interval(values), known, headline)
    told = {"left_out": made.left_out, "mean": made.mean, "interval": list(made.interval), "unit": made.unit}
    write_atomically(folder / FILE, (json.dumps(told, indent=2) + "\n").encode())
    return made
