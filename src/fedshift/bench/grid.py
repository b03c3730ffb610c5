"""Suites that are grids of trainings: rows x columns x seeds, at the paper's scale or cut down, and their tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedshift.bench.columns import DomainRoles, Layout
from fedshift.bench.jobs import Column, Job, Row, about_minutes, chosen_rows, estimated_seconds, grid_jobs
from fedshift.bench.recipes import Recipe, Workload, named_workload, user_workload
from fedshift.bench.records import Record
from fedshift.bench.run import run_jobs
from fedshift.bench.selection import MAIN_RULES
from fedshift.bench.suite import Draw, Scale, Suite, SuiteRequest, SuiteResult
from fedshift.bench.tables import AVERAGE, Table, make_table
from fedshift.data.formats.public import PUBLIC
from fedshift.errors import InputError, nearest
from fedshift.methods import find_about
from fedshift.nn.weights import imagenet_weights
from fedshift.runs.card import skipped_throughout
from fedshift.runs.config import apply_settings

Printed = Mapping[str, Mapping[str, float]]
"""What a paper printed, by row, then column."""


@dataclass(frozen=True)
class Experiment:
    """`paper` has one recipe per data set of the table. `cited` are rows that the paper took from others; they are not
    rerun. With `per_client` the columns are the clients of a run. `tables` is false if only `draw` makes output.
    `alone` trains one job at a time, because times are compared."""

    name: str
    source: str
    question: str
    rows: tuple[Row, ...]
    layout: Layout
    paper: tuple[Recipe, ...]
    mini: Recipe
    baseline: str | None = None
    cited: Printed = field(default_factory=dict)
    per_client: bool = False
    tables: bool = True
    alone: bool = False
    draw: Draw | None = None


def as_suite(experiment: Experiment) -> Suite:
    return Suite(
        name=experiment.name,
        paper=experiment.source,
        question=experiment.question,
        needs=_needs(experiment),
        estimate=functools.partial(_cost, experiment),
        run=functools.partial(run_experiment, experiment),
        rows=experiment.rows,
        seeds={"mini": experiment.mini.seeds, "paper": experiment.paper[0].seeds},
    )


def _needs(experiment: Experiment) -> dict[Scale, str]:
    needed = []
    for recipe in experiment.paper:
        weights = f" and ImageNet weights of {' and '.join(_nets(recipe))}" if recipe.settings.get("weights") else ""
        needed.append(f"{recipe.dataset}{weights}")
    return {
        "mini": f"nothing (built-in {experiment.mini.dataset}), or your own folders with --data-dir",
        "paper": f"{', '.join(needed)}; --data-dir with {_folders([recipe.dataset for recipe in experiment.paper])}",
    }


def _cost(experiment: Experiment) -> dict[Scale, str]:
    nets = ", ".join(dict.fromkeys(net for recipe in experiment.paper for net in _nets(recipe)))
    return {"mini": _mini_cost(experiment), "paper": f"{_trainings(experiment, experiment.paper)} of {nets}: for GPUs"}


def _mini_cost(experiment: Experiment) -> str:
    seconds = None if experiment.mini.dataset in PUBLIC else estimated_seconds(mini_jobs(experiment))
    if seconds is None:
        return f"{_trainings(experiment, [experiment.mini])}, time not measured"
    return f"{about_minutes(seconds if experiment.alone else seconds / 2)} on 2 cores"


def _trainings(experiment: Experiment, recipes: Sequence[Recipe]) -> str:
    """`1 training`, `140 trainings`."""
    columns = sum(len((own.layout or experiment.layout)(own.roles())) * len(own.seeds) for own in recipes)
    count = len(experiment.rows) * columns
    return f"{count} training{'s' * (count != 1)}"


def _nets(recipe: Recipe) -> list[str]:
    """The network of the recipe, and those that rows refer to by name."""
    named = [recipe.names[name] for name in ("large", "small") if name in recipe.names]
    return list(dict.fromkeys([recipe.settings.get("arch", "the default network"), *named]))


def _folders(names: Sequence[str]) -> str:
    return "its folder" if len(names) == 1 else f"a folder for each in it: {', '.join(names)}"


def run_experiment(experiment: Experiment, request: SuiteRequest) -> SuiteResult:
    """Trains the jobs that are not finished and makes tables of all that are."""
    parts = [(workload, jobs_of(experiment, workload, request)) for workload in workloads_of(experiment, request)]
    jobs = [job for _, own in parts for job in own]
    _check_weights(jobs)
    outcome = run_jobs(jobs, request.work, 1 if experiment.alone else request.jobs, request.progress, request.launcher)
    tables: list[Table] = []
    for workload, own in parts:
        digests = {job.digest for job in own}
        records = [record for record in outcome.records if record.job in digests]
        if records and experiment.tables:
            tables += make_tables(experiment, workload, records, request.scale)
    sheets, files = experiment.draw(outcome.records, request) if experiment.draw and outcome.records else ((), ())
    return SuiteResult(
        tables=tuple(tables),
        sheets=tuple(sheets),
        files=tuple(files),
        records=tuple(outcome.records),
        failures=tuple(outcome.failures),
        broken_lines=outcome.broken_lines,
        notes=(
            *(note for workload, own in parts for note in (*workload.notes, *_about_home(workload, own, request))),
            *about_skipped(outcome.records),
        ),
    )


def workloads_of(experiment: Experiment, request: SuiteRequest) -> list[Workload]:
    """What is trained on: the paper's data sets, the built-in one, or the user's folder."""
    try:
        if request.scale == "paper":
            return [named_workload(recipe, request.data_dir) for recipe in experiment.paper]
        if request.data_dir is None:
            return [named_workload(experiment.mini, None)]
        return [user_workload(experiment.mini, request.data_dir, [recipe.dataset for recipe in experiment.paper])]
    except InputError as error:
        several = [recipe.dataset for recipe in experiment.paper] if request.scale == "paper" else []
        more = f" This suite has several data sets: --data-dir holds {_folders(several)}." if len(several) > 1 else ""
        raise InputError(
            error.code, f"suite {experiment.name}, scale {request.scale}: {error.message}{more}"
        ) from error


def mini_jobs(experiment: Experiment) -> list[Job]:
    """The jobs of the suite as it is, at scale mini."""
    return jobs_of(experiment, named_workload(experiment.mini, None), SuiteRequest("mini", Path(), Path()))


def jobs_of(experiment: Experiment, workload: Workload, request: SuiteRequest) -> list[Job]:
    """All trainings of the requested rows and seeds."""
    recipe, given = workload.recipe, apply_settings({}, request.settings)
    columns: Sequence[Column] = (recipe.layout or experiment.layout)(_with_home(workload.roles, given))
    _check_roles(columns, given)
    seeds = recipe.seeds if request.seeds is None else request.seeds
    # Jobs run side by side: more processes per job would only compete with each other.
    common = {"workers": 0, **recipe.settings, **workload.data_keys}
    if request.scale == "paper":
        common = {"aggregation": "mean", **common}  # No paper limits what a site may change.

    def jobs(rows: Sequence[Row], last: Mapping[str, Any]) -> list[Job]:
        return list(grid_jobs(rows, columns, seeds, common, recipe.by_method, last, recipe.names))

    chosen = chosen_rows(experiment.rows, request.methods)
    # A mistyped key is an error even if the rows of its method are not requested.
    left_out = [row for row in experiment.rows if row not in chosen and row.method in given]
    jobs(left_out, {row.method: given[row.method] for row in left_out})
    return jobs(chosen, given)


def _with_home(roles: DomainRoles, given: Mapping[str, Any]) -> DomainRoles:
    """`roles` with the home that the user chose."""
    home = given.get("home")
    if home is None:
        return roles
    if home not in roles.domains:
        raise InputError("config-value", f"--set home={home}: no such domain. {nearest(str(home), roles.domains)}")
    return replace(roles, home=home)


def _check_roles(columns: Sequence[Column], given: Mapping[str, Any]) -> None:
    """Refuses a target or home other than those that name the columns: its scores would be under a wrong name."""
    for role in ("target", "home"):
        named = dict.fromkeys(str(column.settings[role]) for column in columns if role in column.settings)
        if role in given and any(name != str(given[role]) for name in named):
            raise InputError(
                "config-value", f"--set {role}={given[role]}: this suite has its own {role}s: {', '.join(named)}"
            )


def _check_weights(jobs: Sequence[Job]) -> None:
    """Missing weights are an error before anything is trained."""
    for arch, weights in {(job.config.arch, job.config.weights) for job in jobs}:
        if weights == "imagenet":
            imagenet_weights(arch)
        elif weights is not None and not Path(weights).is_file():
            raise InputError("weights-missing", f"there is no weights file {weights}")


def make_tables(experiment: Experiment, workload: Workload, records: Sequence[Record], scale: Scale) -> Iterator[Table]:
    shown = list(by_client(records)) if experiment.per_client else records
    printed = theirs(experiment, workload.recipe.dataset) if scale == "paper" else {}
    homes = {record.home for record in records if record.home}
    at_home = f", home {homes.pop()}" if len(homes) == 1 else ""
    for rule, choose in MAIN_RULES.items():
        yield make_table(
            shown,
            choose,
            rule,
            f"{experiment.name} on {workload.title}{at_home}",
            experiment.baseline,
            printed,
            [row.label for row in experiment.rows if find_about(row.method).is_bound],
        )


def by_client(records: Sequence[Record]) -> Iterator[Record]:
    """One record per client."""
    for record in records:
        for client, scores in record.scores.items():
            yield replace(record, column=client, target=client, scores={client: scores})


def theirs(experiment: Experiment, dataset: str) -> dict[str, dict[str, float]]:
    """What the paper printed for a data set. With several data sets, column names are `DATASET/COLUMN`."""
    printed = {**{row.label: row.theirs for row in experiment.rows if row.theirs}, **experiment.cited}
    several = len(experiment.paper) > 1
    found = {}
    for row, numbers in printed.items():
        own = {key.removeprefix(f"{dataset}/"): value for key, value in numbers.items()}
        found[row] = {key: value for key, value in own.items() if not several or f"{dataset}/{key}" in numbers}
    return {row: numbers for row, numbers in found.items() if numbers}


def printed(columns: Sequence[str], *numbers: float, dataset: str = "") -> dict[str, float]:
    """A row of a paper's table. One more number than columns is the average."""
    names = [*columns, AVERAGE][: len(numbers)]
    assert len(numbers) in (len(columns), len(columns) + 1), f"{len(numbers)} numbers for {columns}"
    return {f"{dataset}/{name}" if dataset else name: number for name, number in zip(names, numbers, strict=True)}


def _about_home(workload: Workload, jobs: Sequence[Job], request: SuiteRequest) -> list[str]:
    """A note that names the home if the whole table has one."""
    homes = list(dict.fromkeys(job.config.home for job in jobs))
    if len(homes) != 1 or homes[0] is None:
        return []
    is_chosen = homes[0] == workload.recipe.home or "home" in apply_settings({}, request.settings)
    if is_chosen or request.data_dir is None:
        return [f"The home, the only domain with labels, is {homes[0]}."]
    return [
        f"The home, the only domain with labels, is {homes[0]}: the first of {', '.join(workload.roles.domains)}."
        " Choose another with --set home=NAME."
    ]


def about_skipped(records: Sequence[Record]) -> list[str]:
    """A note for each client that was skipped in all rounds of a run."""
    rows: dict[str, dict[str, None]] = {}
    for record in records:
        rounds = max(record.rounds, default=1)
        for client in skipped_throughout({"counters": record.counters, "per_target": record.scores, "rounds": rounds}):
            rows.setdefault(client, {})[record.row] = None
    return [
        f"{client} was skipped in every round of {', '.join(own)}: its scores there are of models trained without it."
        for client, own in sorted(rows.items())
    ]
