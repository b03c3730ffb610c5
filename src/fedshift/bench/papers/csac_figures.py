"""CSAC, Figures 4, 7, 8 and 9: distances between models, fusion weights, t-SNE of features, and local and fused models
over rounds."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.audit.parameters import DomainModels, Starts, train_domain_models
from fedshift.bench import recipes
from fedshift.bench.figures import draw_lines, new_figure, saved
from fedshift.bench.grid import Experiment, jobs_of, workloads_of
from fedshift.bench.jobs import Job
from fedshift.bench.recipes import Recipe, Workload, named_workload, user_workload
from fedshift.bench.records import Record
from fedshift.bench.suite import Drawn, SuiteRequest, SuiteResult, only_seed, options_of, with_time_left
from fedshift.bench.tables import Sheet, Value
from fedshift.data import open_dataset
from fedshift.federation import codec
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.federation import Federation
from fedshift.federation.handshake import agree
from fedshift.federation.releases import Weights
from fedshift.federation.step import Request
from fedshift.files import write_atomically
from fedshift.methods import find_method
from fedshift.methods.base import SHARED
from fedshift.methods.evaluation import headline, score_models
from fedshift.methods.evaluation import score as scoring
from fedshift.nn.network import Network
from fedshift.runs.api import Run, as_inputs
from fedshift.runs.config import RunConfig, apply_settings, make_config, read_config
from fedshift.runs.features import flatten
from fedshift.runs.planning import Prepared, base_network, data_source, open_federation, prepare

# --- Figure 4: distances between models -----------------------------------------------------------------------------

STARTS: tuple[Starts, ...] = ("same", "random")
DISTANCE_COLUMNS = ("intra-domain L2", "inter-domain L2", "inter / intra", "nearest is of its domain", "by chance")

_ACQUIRED: Mapping[str, Any] = {
    **recipes.RESNET_18,
    "lr": 0.01,
    "momentum": 0.5,
    "batch_size": 64,
    "local_epochs": 30.0,
}
FIG4_PAPER = tuple(Recipe(name, _ACQUIRED) for name in ("digits-dg", "vlcs"))
"""The paper has 50 models of ResNet-18 per domain. They train as CSAC's sites do before they collaborate."""

FIG4_MINI = recipes.DIGITS.but(local_epochs=5.0, train_per_site=200, schedule="constant")


@dataclass(frozen=True)
class DistanceOptions:
    """`--set parameters.KEY=VALUE`: models per domain."""

    models: int


MODELS = {"mini": DistanceOptions(10), "paper": DistanceOptions(50)}

TRAINING = (
    "arch",
    "weights",
    "freeze_norm",
    "image_size",
    "train_per_site",
    "batch_size",
    "lr",
    "backbone_lr_factor",
    "momentum",
    "weight_decay",
    "local_epochs",
    "schedule",
)
"""Keys of a recipe that describe a single training."""


def fig4(request: SuiteRequest) -> SuiteResult:
    """DIFFERS: the paper does not say how its models differ. Pre-trained models start alike: `same`. Models with random
    initial weights are shown beside them."""
    sheets: list[Sheet] = []
    files: list[Path] = []
    notes: list[str] = []
    seed = only_seed(request, "csac/fig4", "parameters.models")
    for workload in _fig4_workloads(request):
        values = {**{k: v for k, v in workload.recipe.settings.items() if k in TRAINING}, **workload.data_keys}
        options, keys = options_of("parameters", MODELS[request.scale], apply_settings(values, request.settings))
        for starts in STARTS if not keys.get("weights") else STARTS[:1]:
            progress = with_time_left(request.progress)
            found = train_domain_models(options.models, starts, seed=seed, work=request.work, progress=progress, **keys)
            sheets.append(distance_sheet(found))
            files += write_distances(found, request.out)
        notes += [*workload.notes, f"{workload.title}: {options.models} models per domain, seed {seed}."]
    return SuiteResult(sheets=tuple(sheets), files=tuple(files), notes=tuple(notes))


def _fig4_workloads(request: SuiteRequest) -> list[Workload]:
    if request.scale == "paper":
        return [named_workload(recipe, request.data_dir) for recipe in FIG4_PAPER]
    if request.data_dir is None:
        return [named_workload(FIG4_MINI, None)]
    return [user_workload(FIG4_MINI, request.data_dir, [recipe.dataset for recipe in FIG4_PAPER])]


def distance_sheet(found: DomainModels) -> Sheet:
    rows: dict[str, list[Value]] = {
        layer: [own.within, own.between, own.between / own.within, own.nearest, found.chance]
        for layer, own in found.separations().items()
    }
    return Sheet(
        f"{found.dataset}, {found.arch}, {found.starts} start: distances of parameters", DISTANCE_COLUMNS, rows
    )


def write_distances(found: DomainModels, out: Path) -> list[Path]:
    """Writes a picture (distances by layer, then the models of each layer) and the numbers as JSON. Returns the path of
    the picture."""
    separations = found.separations()
    figure, axes = new_figure(1 + len(separations))
    figure.set_size_inches(4 * len(axes), 4)
    for name, values in (
        ("intra-domain", [own.within for own in separations.values()]),
        ("inter-domain", [own.between for own in separations.values()]),
    ):
        axes[0].plot(range(len(values)), values, marker="o", label=name)
    axes[0].set_xticks(range(len(separations)), list(separations))
    axes[0].set_ylabel("mean L2 distance")
    axes[0].legend(fontsize="small")
    for axis, (layer, distances) in zip(axes[1:], found.distances.items(), strict=True):
        points = tsne_of_distances(distances)
        for group, domain in enumerate(found.domains):
            own = points[(found.groups == group).numpy()]
            axis.scatter(own[:, 0], own[:, 1], s=14, label=domain)
        axis.set_title(layer)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[1].legend(fontsize="x-small")
    stem = f"parameters-{found.dataset}-{found.starts}"
    numbers = {
        "dataset": found.dataset,
        "arch": found.arch,
        "starts": found.starts,
        "domains": list(found.domains),
        "models": len(found.groups),
        "chance": found.chance,
        "layers": {layer: asdict(own) for layer, own in separations.items()},
    }
    write_atomically(out / f"{stem}.json", (json.dumps(numbers, indent=2) + "\n").encode())
    return [saved(figure, out / f"{stem}.png")]


def tsne_of_distances(distances: Tensor) -> NDArray[Any]:
    """t-SNE, `(n, 2)`, from distances `(n, n)` alone: the models may have millions of dimensions."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(distances) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="random", metric="precomputed", random_state=0)
    found: NDArray[Any] = tsne.fit_transform(distances.numpy())
    return found


# --- Figure 7: weights of the fusion --------------------------------------------------------------------------------

FUSION_PREFIX = "fusion."


def fusion_weights(records: Sequence[Record], request: SuiteRequest) -> Drawn:
    """CSAC, Fig. 7: a sheet and a picture per target, with one panel per layer and one line per site."""
    sheets, files = [], []
    for record in records:
        stages = {
            name.removeprefix(FUSION_PREFIX): curve
            for name, curve in record.notes.items()
            if name.startswith(FUSION_PREFIX)
        }
        rows = {f"{stage}, {site}": values for stage, curve in stages.items() for site, values in curve.items()}
        title = f"weight in the fusion, by round; target {record.column}, seed {record.seed}"
        sheets.append(Sheet(title, tuple(str(number) for number in record.rounds), rows))
        name = f"csac-fig7-{record.dataset}-{record.column}-seed{record.seed}.png"
        files.append(draw_lines(request.out / name, stages, record.rounds, "weight"))
    return sheets, files


# --- Figure 8: t-SNE of features ------------------------------------------------------------------------------------

POINTS = 1000
"""Maximal number of points: t-SNE takes seconds for these."""


def feature_maps(records: Sequence[Record], request: SuiteRequest) -> Drawn:
    """One picture per target and seed: one column per method, classes above and domains below. The sheet has mean
    silhouettes, from -1 to 1: of classes (higher is better) and of domains (lower is better)."""
    from sklearn.metrics import silhouette_score

    files, rows = [], {}
    for target, seed in dict.fromkeys((record.column, record.seed) for record in records):
        own = [record for record in records if (record.column, record.seed) == (target, seed)]
        figure, axes = new_figure(len(own), rows=2)
        for number, record in enumerate(own):
            features, classes, domains, names = features_of(request.work / "jobs" / record.job)
            points = flatten(features)
            above, below = axes[number], axes[len(own) + number]
            above.scatter(points[:, 0], points[:, 1], c=classes % 20, cmap="tab20", s=6)
            for domain, name in enumerate(names):
                below.scatter(*points[domains == domain].T, s=6, label=name)
            below.legend(fontsize="small")
            above.set(title=f"{record.row}: classes", xticks=[], yticks=[])
            below.set(title=f"{record.row}: domains", xticks=[], yticks=[])
            by_class, by_domain = (float(silhouette_score(features, groups)) for groups in (classes, domains))
            rows[f"{record.row}, {target}, seed {seed}"] = [by_class, by_domain]
        files.append(saved(figure, request.out / f"csac-fig8-{target}-seed{seed}.png"))
    return [Sheet("separation of features (silhouette)", ("by class", "by domain"), rows)], files


def features_of(folder: Path) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], tuple[str, ...]]:
    """Features `(n, d)` of test images of all domains by the last model, their classes and domains `(n,)`, and the
    names of the domains."""
    net = Run(folder).model().network()
    if not isinstance(net, Network):
        raise TypeError(f"{type(net).__name__} has no single extractor to take features from")
    dataset = open_dataset(data_source(make_config(read_config(folder / "config.yaml"))))
    features, classes, domains = [], [], []
    share = POINTS // len(dataset.domains)
    for number, name in enumerate(dataset.domains):
        split = dataset.load(name).test
        # Evenly spaced: the split may be sorted by class.
        chosen = np.unique(np.linspace(0, len(split) - 1, min(share, len(split))).astype(np.int64))
        part = split.take(chosen)
        with torch.inference_mode():
            features.append(net.features(as_inputs(part.inputs, dataset.input_shape)).flatten(1).numpy())
        classes.append(np.zeros(len(part), np.int64) if part.labels is None else part.labels)
        domains.append(np.full(len(part), number))
    return np.concatenate(features), np.concatenate(classes), np.concatenate(domains), dataset.domains


# --- Figure 9: local and fused models -------------------------------------------------------------------------------

FUSED = "fused"

Curves = dict[str, dict[str, list[float | None]]]
"""Model -> domain -> scores after acquisition and after each round."""


def run_local_models(experiment: Experiment, request: SuiteRequest) -> SuiteResult:
    """One sheet and one picture per target and seed. This is a simulation on one machine: in a federation, the
    coordinator does not score the models of single sites."""
    sheets, files = [], []
    workloads = workloads_of(experiment, request)
    jobs = [job for workload in workloads for job in jobs_of(experiment, workload, request)]
    for done, job in enumerate(jobs):
        curves = _cached(job, request.work)
        ticks = ["acquired", *(str(round) for round in range(1, len(next(iter(curves[FUSED].values())))))]
        rows = {
            f"model of {model}, on {domain}": values for model, own in curves.items() for domain, values in own.items()
        }
        sheets.append(Sheet(f"accuracy of every model on every domain; target {job.column}", tuple(ticks), rows))
        panels = {f"model of {model}" if model != FUSED else "fused model": own for model, own in curves.items()}
        files.append(
            draw_lines(request.out / f"csac-fig9-{job.column}-seed{job.config.seed}.png", panels, ticks, "accuracy")
        )
        request.progress(f"{job.row}, {job.column}, seed {job.config.seed}", done + 1, len(jobs), 0.0)
    return SuiteResult(sheets=tuple(sheets), files=tuple(files), notes=workloads[0].notes)


def _cached(job: Job, work: Path) -> Curves:
    """The curves of a job, computed once and kept in `work`."""
    path = work / "local-models" / f"{job.digest}.json"
    if not path.exists():
        write_atomically(path, json.dumps(curves_of(job.config)).encode())
    found: Curves = json.loads(path.read_text())
    return found


def curves_of(config: RunConfig) -> Curves:
    """Runs CSAC, keeps the models that sites send, and scores each of them on every domain."""
    prepared = prepare(config)
    curves: Curves = {}
    with tempfile.TemporaryDirectory(prefix="fedshift-local-") as folder:
        fed = open_federation(prepared, Path(folder))
        engine = fed.engine = RecordingEngine(fed.engine)
        try:
            agree(fed, [person.name for person in prepared.roles.sites], rewind_to=0)
            implementation = find_method(config.method)
            method = implementation(codec.restore(implementation.hyper_type, dict(prepared.plan.hyper)))
            state = method.init(base_network(prepared)[0], fed)
            for round in range(1, prepared.plan.training.rounds + 1):
                fed.begin(round)
                engine.models.clear()
                state = method.round(state, fed)
                for step, models in engine.models.items():
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
    fed.begin(fed.round)  # Sites on other machines score once per round; this study, on one, scores every model.
    val = score_models(fed, {SHARED: model}, roles.validation, "val")
    test = score_models(fed, {SHARED: model}, roles.tested, "test")
    return {domain: headline(matrix, task) for domain, matrix in {**val, **test}.items()}


@dataclass
class RecordingEngine:
    """An engine that keeps the models in the replies of sites, by step and site."""

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
