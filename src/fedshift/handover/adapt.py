"""`fedshift adapt`: a finished model for a new site, from that site's unlabelled data, while no other site is online.

The result is a run directory of its own. What adapting may have brought is estimated without labels, and is called an
estimate; where the folder has labels, a part of them is measured on, and none is learned from.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedshift._version import __version__
from fedshift.data.batches import LabelledData
from fedshift.data.domain import Domain, Split, joined_inputs
from fedshift.data.formats.tables import read_features
from fedshift.data.index.survey import Agreed, open_survey, survey_site
from fedshift.data.tiling import surveyed_in_tiles
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.plan import Plan, Training
from fedshift.federation.step import fixed_threads
from fedshift.files import read_bounded, write_atomically
from fedshift.functional.metrics import confusion_matrix
from fedshift.functional.tiles import stitched_classes
from fedshift.handover.estimate import left_out_gaps
from fedshift.handover.transfer import ADAPTED, AS_IT_WAS, STATISTICS, Adaptation, State, can_measure, networks_of
from fedshift.methods import find_method, shot
from fedshift.methods.base import SHARED
from fedshift.methods.evaluation import headline
from fedshift.methods.local import weights_of
from fedshift.runs.api import Run, Select, as_inputs
from fedshift.runs.config import RunConfig, make_config, read_config
from fedshift.runs.directory import RunDirectory, environment
from fedshift.runs.files.model import ModelHeader, SavedModel, probabilities, save_model
from fedshift.runs.health import find_warnings, in_percent, intervals
from fedshift.yamlfiles import LARGEST

LEAST = 20
"""Inputs that are needed: two halves are compared, and statistics of fewer than ten are noise."""
EPOCHS = 8
LR_FACTOR = 0.3
"""Times the rate that the run was trained with: at the full rate the digits' models forgot what they knew."""
_CLEARLY = 0.01
"""By how much the estimate with own statistics must be better for them to be kept."""
Keep = Literal["auto", "statistics", "adapted"]


@dataclass(frozen=True)
class Measured:
    """Accuracy on labelled samples that were not used, before and after, how many there were."""

    before: float
    after: float
    samples: int
    confusion: list[list[int]]


@dataclass(frozen=True)
class Adapted:
    """What became of it: each state of the model at the new site, the one that was kept, and what was not possible."""

    path: Path
    site: str
    inputs: int
    states: tuple[State, ...]
    kept: State
    notes: tuple[str, ...]
    measured: Measured | None
    task: str
    gaps: tuple[float, ...] = ()
    """By how much confidence was above accuracy at sites that were left out, where `fedshift estimate` found that."""

    @property
    def expected(self) -> tuple[float, float]:
        """Estimates, without labels, of the accuracy before and after: what the model is sure of, minus what it was too
        sure of at sites that it had not learned from."""
        too_sure = statistics.fmean(self.gaps) if self.gaps else 0.0
        before, after = (min(1.0, max(0.0, s.expected - too_sure)) for s in (self.states[0], self.kept))
        return before, after

    def lines(self) -> list[str]:
        """What is to be told of it, line by line."""
        before, after = self.expected
        shown = [
            f"- {state.name}: mean confidence {_percent(state.confidence)}, {_percent(state.changed)} of the answers"
            f" changed, two halves agree on {_percent(state.agreement)}"
            for state in self.states
        ]
        told = (
            f"{_percent(before)} before, {_percent(after)} after" if self.task == "classification" else "none for masks"
        )
        shown.append(f"- Estimated accuracy, without any label (an estimate, see docs/after-training.md): {told}")
        if self.gaps:
            low, high = 100 * min(self.gaps), 100 * max(self.gaps)
            shown.append(
                f"- Corrected by what confidence was off at {len(self.gaps)} sites that were left out: by {low:+.1f} to"
                f" {high:+.1f} points"
            )
        elif self.task == "classification":
            shown.append(
                "- Not corrected: confidence is usually too high at a new site, in our measurements by about 10 points."
                " fedshift estimate RUN measures by how much for this model; then run this again"
            )
        if self.measured:
            found = self.measured
            shown.append(
                f"- Measured on {found.samples:,} labelled samples that were not adapted to:"
                f" {in_percent(found.before, found.samples, self.task)} before,"
                f" {in_percent(found.after, found.samples, self.task)} after"
            )
        return [*shown, *(f"- {note}" for note in self.notes)]

    def plain(self) -> dict[str, Any]:
        """For `results.json`."""
        names = ("name", "confidence", "changed", "agreement", "expected")
        return {
            "kept": self.kept.name,
            "inputs": self.inputs,
            "states": [{name: getattr(state, name) for name in names} for state in self.states],
            "estimates": list(self.expected),
            "too_sure_at_left_out": list(self.gaps),
            "measured": dataclasses.asdict(self.measured) if self.measured else None,
            "notes": list(self.notes),
        }


def adapt_run(
    run: Path | str,
    folder: Path | str,
    out: Path | str,
    *,
    site: str | None = None,
    select: Select = "last",
    epochs: int = EPOCHS,
    keep: Keep = "auto",
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Adapted:
    """Adapts a finished run's model to the pictures (or the table) of one new site and writes a new run to `out`.

    `site` chooses the model to begin with, where the run has one per client. `keep` is `auto`, or the state to keep
    whatever the estimate says: `statistics` or `adapted`."""
    started = time.perf_counter()
    finished, target = Run(run), RunDirectory(Path(out))
    if target.path.exists() and any(target.path.iterdir()):
        raise InputError("run-exists", f"{target.path} is not empty: choose another --out")
    saved = finished.model(select)
    net = saved.uncalibrated(finished.choose(saved, site))
    header, config = saved.header, make_config(read_config(finished.directory.config, "run-corrupt"))
    transfer, notes = _possible(net, header)
    domain = _open_site(Path(folder), header)
    inputs, test = _parts(domain)
    if len(inputs) < LEAST:
        raise InputError(
            "data-empty", f"{folder} has {len(inputs)} samples to adapt to; it takes {LEAST} at least: add some"
        )
    say(f"{domain.name}: {len(inputs):,} samples to adapt to, no label is used")
    plan = _plan(header, config, epochs, seed)
    with fixed_threads(plan.threads):
        states = Adaptation(plan, shot.Hyper(), inputs, header.temperature).states(
            net, transfer=transfer and keep == "adapted"
        )
    if transfer and keep == "adapted" and len(states) < 2 + can_measure(net):
        notes.append("The adaptation gave NaN or infinite weights and was left out: the run's lr is too high for it.")
    kept = _kept(states, keep)
    measured = _measure(states[0], kept, header, test)
    found = tuple(states), kept, tuple(notes), measured, header.task
    adapted = Adapted(target.path, domain.name, len(inputs), *found, tuple(left_out_gaps(finished)))
    _write(adapted, finished, saved, target, seed, plan.threads, time.perf_counter() - started)
    return adapted


def _possible(net: torch.nn.Module, header: ModelHeader) -> tuple[bool, list[str]]:
    """Whether features can be adapted, and words on what cannot be done with this model. If nothing can, an error."""
    notes = []
    transfer = header.task == "classification" and bool(networks_of(net))
    if header.task == "segmentation":
        notes.append("Features are not adapted: labels from class centres are for pictures, not for pixels.")
    elif not transfer:
        notes.append(f"Features are not adapted: {header.method}'s network has no classifier on top that could stay.")
    if not can_measure(net):
        kind = "keeps the statistics of its initial weights" if header.freeze_norm else "has no layer with statistics"
        notes.append(f"Own statistics are not measured: the network {kind}.")
        if not transfer:
            raise InputError("method-needs", f"this model cannot be adapted without labels. {' '.join(notes)}")
    return transfer, notes


def _open_site(folder: Path, header: ModelHeader) -> Domain:
    """The new site's data as the model takes them."""
    if not folder.exists():
        raise InputError("data-missing", f"there is nothing at {folder}")
    if len(header.input_shape) == 1:
        rows = read_features(folder, header.columns)
        whole, nothing = Split(rows, None), Split(rows[:0], None)
        return Domain(folder.stem, whole, nothing, nothing)
    if not folder.is_dir():
        raise InputError("data-missing", f"{folder} is not a folder of pictures")
    agreed = Agreed(header.task, header.classes)
    size = (header.input_shape[1], header.input_shape[2])
    found = survey_site(folder, agreed, size)
    dataset = open_survey(surveyed_in_tiles(found, size[0], header.scaled_to) if header.tiled else found)
    return dataset.load(dataset.domains[0])


def _parts(domain: Domain) -> tuple[Split, Split | None]:
    """What is adapted to, and the labelled part that is only measured on. Without labels everything is adapted to."""
    has_labels = domain.test.labels is not None and len(domain.test) > 0
    splits = [domain.train, domain.val, *(() if has_labels else (domain.test,))]
    inputs = joined_inputs(splits)
    return inputs, domain.test if has_labels else None


def _plan(header: ModelHeader, config: RunConfig, epochs: int, seed: int) -> Plan:
    """The run's own way of training, for one pass a round over the new site's inputs."""
    keys = {key.name: getattr(config, key.name) for key in dataclasses.fields(Training)}
    training = Training(
        **{**keys, "lr": LR_FACTOR * keys["lr"], "rounds": epochs, "local_epochs": 1.0, "schedule": "cosine"}
    )
    hyper = codec.completed(find_method(header.method).hyper_type, dict(header.hyper))
    return Plan(
        __version__, header.method, header.setting, header.sources, seed, config.threads, header.spec, training, hyper
    )


def _kept(states: Sequence[State], keep: Keep) -> State:
    """The state that was asked for. With `auto`, own statistics if their estimate is better. Never an adapted one: in
    measurements its estimate was once 44 points too high, and nothing without labels told."""
    if keep == "auto":
        before, *others = states
        better = [s for s in others if s.name == STATISTICS and s.expected > before.expected + _CLEARLY]
        return better[0] if better else before
    wanted = {"statistics": STATISTICS, "adapted": ADAPTED}[keep]
    found = [state for state in states if state.name == wanted]
    if not found:
        raise InputError("method-needs", f"--keep {keep}: that was not possible with this model and these data")
    return found[0]


def _measure(before: State, after: State, header: ModelHeader, test: Split | None) -> Measured | None:
    if test is None or test.labels is None:
        return None
    matrices = [_confusion(state, header, test) for state in (before, after)]
    scores = [headline(matrix, header.task) for matrix in matrices]
    return Measured(scores[0], scores[1], len(test), matrices[1].tolist())


@torch.inference_mode()
def _confusion(state: State, header: ModelHeader, test: Split) -> Tensor:
    if test.tiles is not None:
        data, total = LabelledData(test, torch.device("cpu")), torch.zeros(len(header.classes), len(header.classes))
        for picture, mask in data.pictures() or ():
            found = stitched_classes(state.net, picture, data.side)
            total += confusion_matrix(found.long(), mask.long(), len(header.classes))
        return total.long()
    inputs = as_inputs(np.array(test.inputs), header.input_shape)
    labels = torch.from_numpy(np.array(test.labels, dtype=np.int64))
    return confusion_matrix(probabilities(state.net, inputs).argmax(1), labels, len(header.classes))


def _write(
    adapted: Adapted,
    parent: Run,
    saved: SavedModel,
    target: RunDirectory,
    seed: int,
    threads: int,
    seconds: float,
) -> None:
    """The run directory, as `predict`, `export`, `serve` and `report` read it."""
    header = dataclasses.replace(saved.header, setting="adapt", written_by=__version__)
    if adapted.kept.name != AS_IT_WAS:  # What was measured at the sources holds no more.
        header = dataclasses.replace(header, far=None, usual=None)
    if adapted.kept.name == ADAPTED:
        header = dataclasses.replace(header, temperature=1.0)
    measured, site, old = adapted.measured, adapted.site, parent.results
    with target.locked():
        write_atomically(target.config, parent.directory.read(parent.directory.config, LARGEST))
        write_atomically(target.environment, json.dumps(environment(threads), indent=2).encode())
        write_atomically(target.metrics, b"")
        digest = save_model(target.model, SavedModel(header, {SHARED: weights_of(adapted.kept.net)}))
        scores = dict.fromkeys(("last", "source_val", "oracle"), measured.after) if measured else {}
        kept = ("method", "task", "dataset", "sources", "home", "rounds", "arch", "classes", "attack")
        results: dict[str, Any] = {key: old.get(key) for key in kept} | {
            "setting": "adapt",
            "target": site,
            "seed": seed,
            "accuracy" if header.task == "classification" else "miou": scores,
            "per_target": {site: scores} if scores else {},
            "source_val": {},
            "chosen_round": None,
            "confusion": {site: measured.confusion} if measured else {},
            "val_confusion": {},
            "samples": {site: {"train": adapted.inputs, "val": 0, "test": measured.samples if measured else 0}},
            "bytes": dict.fromkeys(("up", "down", "scoring_up", "scoring_down"), 0),
            "flops_client": None,
            "seconds": {"total": round(seconds, 3), "sites": round(seconds, 3), "coordinator": 0.0},
            "counters": {},
            "model_sha256": digest,
            "adapted": adapted.plain() | {"from_model_sha256": old.get("model_sha256", "")},
        }
        results |= {"intervals": intervals(results)}
        results["warnings"] = find_warnings(results, [], {})
        target.write_results(results)
        target.write_card(_card(adapted, parent, results))
        target.mark_done()


def _card(adapted: Adapted, parent: Run, results: dict[str, Any]) -> str:
    before = parent.directory.card
    text = read_bounded(before, LARGEST).decode(errors="replace") if before.exists() else "(it has no card)\n"
    return "\n".join(
        [
            f"# {results['method']} on {results['dataset']}, adapted to {adapted.site}",
            "",
            f"- Adapted to {adapted.inputs:,} samples of {adapted.site} without their labels; no other site took part",
            f"- Kept: {adapted.kept.name}",
            f"- SHA-256 of model.safetensors: `{results['model_sha256']}`",
            "",
            *adapted.lines(),
            "",
            "# The model before it was adapted",
            "",
            text.replace("\n#", "\n##").removeprefix("# "),
        ]
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
