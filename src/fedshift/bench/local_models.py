"""CSAC, Fig. 9: how good each site's model and the fused one are on every domain, round by round.

A federation never looks at single sites' models: this is a simulation on one machine that does."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedshift.bench.experiment import Experiment, jobs_of, places_of
from fedshift.bench.figures import draw_lines
from fedshift.bench.jobs import Job
from fedshift.bench.sheets import Sheet
from fedshift.bench.suite import Found, Order
from fedshift.federation import codec
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.federation import Federation
from fedshift.federation.handshake import agree
from fedshift.federation.kinds import Weights
from fedshift.federation.step import Request
from fedshift.files import write_atomically
from fedshift.methods import find_method
from fedshift.methods.base import SHARED
from fedshift.methods.evaluation import headline, score_models
from fedshift.methods.evaluation import score as scoring
from fedshift.runs.config import RunConfig
from fedshift.runs.planning import Prepared, base_network, open_federation, prepare

FUSED = "fused"

Curves = dict[str, dict[str, list[float | None]]]
"""Model -> domain -> its score after acquisition and after each round."""


def run_local_models(experiment: Experiment, order: Order) -> Found:
    """A sheet and a picture for each target and seed."""
    sheets, files = [], []
    (place, *_) = places = places_of(experiment, order)
    jobs = [job for each in places for job in jobs_of(experiment, each, order)]
    for done, job in enumerate(jobs):
        curves = _remembered(job, order.work)
        where = f"{job.column}-seed{job.config.seed}"
        ticks = ["acquired", *(str(round) for round in range(1, len(next(iter(curves[FUSED].values())))))]
        rows = {
            f"model of {model}, on {domain}": values for model, own in curves.items() for domain, values in own.items()
        }
        sheets.append(Sheet(f"accuracy of every model on every domain; target {job.column}", tuple(ticks), rows))
        panels = {f"model of {model}" if model != FUSED else "fused model": own for model, own in curves.items()}
        files.append(draw_lines(order.out / f"csac-fig9-{where}.png", panels, ticks, "accuracy"))
        order.tell(f"{job.row}, {job.column}, seed {job.config.seed}", done + 1, len(jobs), 0.0)
    return Found(sheets=tuple(sheets), files=tuple(files), notes=place.notes)


def _remembered(job: Job, work: Path) -> Curves:
    """What was found before, else found now."""
    path = work / "local-models" / f"{job.digest}.json"
    if not path.exists():
        write_atomically(path, json.dumps(curves_of(job.config)).encode())
    found: Curves = json.loads(path.read_text())
    return found


def curves_of(config: RunConfig) -> Curves:
    """Plays CSAC, keeping what sites send, and scores each model on every domain."""
    prepared = prepare(config)
    curves: Curves = {}
    with tempfile.TemporaryDirectory(prefix="fedshift-local-") as folder:
        fed = open_federation(prepared, Path(folder))
        listening = fed.engine = Listening(fed.engine)
        try:
            agree(fed, [person.name for person in prepared.roles.sites], rewind_to=0)
            implementation = find_method(config.method)
            method = implementation(codec.restore(implementation.hyper_type, dict(prepared.plan.hyper)))
            state = method.init(base_network(prepared)[0], fed)
            for round in range(1, prepared.plan.training.rounds + 1):
                fed.begin(round)
                listening.models.clear()
                state = method.round(state, fed)
                for step, models in listening.models.items():
                    _add(curves, {site: _scores(fed, prepared, model) for site, model in models.items()})
                    if step.endswith("acquire"):
                        _add(curves, {FUSED: dict.fromkeys(_domains(prepared))})
                _add(curves, {FUSED: _scores(fed, prepared, method.models(state)[SHARED])})
        finally:
            fed.engine.close()
    return curves


def _add(curves: Curves, found: Mapping[str, Mapping[str, float | None]]) -> None:
    for model, scores in found.items():
        for domain, score in scores.items():
            curves.setdefault(model, {}).setdefault(domain, []).append(score)


def _domains(prepared: Prepared) -> tuple[str, ...]:
    return (*prepared.roles.validation, *prepared.roles.tested)


def _scores(fed: Federation, prepared: Prepared, model: Weights) -> dict[str, float | None]:
    """By domain: sources on their validation split, the target on its test split."""
    roles, task = prepared.roles, prepared.plan.model.task
    val = score_models(fed, {SHARED: model}, roles.validation, "val")
    test = score_models(fed, {SHARED: model}, roles.tested, "test")
    return {domain: headline(matrix, task) for domain, matrix in {**val, **test}.items()}


@dataclasses.dataclass
class Listening:
    """An engine that keeps the models which pass through it, by step and site."""

    inner: Engine

    def __post_init__(self) -> None:
        self.where_to_look = self.inner.where_to_look
        self.models: dict[str, dict[str, Weights]] = {}

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        for site, reply in self.inner.call(requests, deadline):
            step = requests[0].step
            if isinstance(reply, bytes) and step != scoring.name:
                release = codec.unpack(reply).get("release") or {}
                if "model" in release:
                    self.models.setdefault(step, {})[site] = release["model"]
            yield site, reply

    def close(self) -> None:
        self.inner.close()
