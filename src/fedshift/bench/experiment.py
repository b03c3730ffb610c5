"""A suite that is a grid of trainings: rows x columns x seeds at the paper's scale or cut down, and tables of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedshift.bench.estimate import in_words, seconds_of
from fedshift.bench.jobs import Column, Job, Row, chosen_rows, grid
from fedshift.bench.layouts import Layout, Scene
from fedshift.bench.places import Place, given_place, named_place
from fedshift.bench.recipes import Recipe
from fedshift.bench.records import Record
from fedshift.bench.runner import run_jobs
from fedshift.bench.selection import MAIN_RULES
from fedshift.bench.sheets import Sheet
from fedshift.bench.suite import Found, Order, Scale, Suite
from fedshift.bench.tables import AVERAGE, Table, make_table
from fedshift.data.public import PUBLIC
from fedshift.errors import InputError, nearest
from fedshift.methods import find_about
from fedshift.nn.imagenet import imagenet_weights
from fedshift.runs.card import skipped_throughout
from fedshift.runs.config import apply_settings

Drawn = tuple[Sequence[Sheet], Sequence[Path]]
Draw = Callable[[Sequence[Record], Order], Drawn]
"""From the records of a grid to sheets and pictures: what makes a figure of it."""

Printed = Mapping[str, Mapping[str, float]]
"""By row, then column: what a paper printed."""


@dataclass(frozen=True)
class Experiment:
    """`paper` has a recipe for each data set of the table. `cited` are rows that the paper took from others and that
    nobody reruns. With `per_client` a run's clients are its columns. `tables` is false where only `draw` has something
    to say; `alone` trains one job at a time, because times are compared."""

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
        cost=_cost(experiment),
        run=functools.partial(run_experiment, experiment),
        rows=experiment.rows,
        seeds={"mini": experiment.mini.seeds, "paper": experiment.paper[0].seeds},
    )


def run_experiment(experiment: Experiment, order: Order) -> Found:
    """Trains what is not trained yet and makes the tables of what there is."""
    parts = [(place, jobs_of(experiment, place, order)) for place in places_of(experiment, order)]
    jobs = [job for _, own in parts for job in own]
    _check_weights(jobs)
    outcome = run_jobs(jobs, order.work, 1 if experiment.alone else order.jobs, order.tell, order.launcher)
    tables: list[Table] = []
    for place, own in parts:
        digests = {job.digest for job in own}
        records = [record for record in outcome.records if record.job in digests]
        if records and experiment.tables:
            tables += make_tables(experiment, place, records, order.scale)
    sheets, files = experiment.draw(outcome.records, order) if experiment.draw and outcome.records else ((), ())
    return Found(
        tables=tuple(tables),
        sheets=tuple(sheets),
        files=tuple(files),
        records=tuple(outcome.records),
        failures=tuple(outcome.failures),
        broken_lines=outcome.broken_lines,
        notes=(
            *(note for place, own in parts for note in (*place.notes, *_about_home(place, own, order))),
            *about_skipped(outcome.records),
        ),
    )


def places_of(experiment: Experiment, order: Order) -> list[Place]:
    """Where it is measured: the paper's data sets, the built-in one, or what the user gave."""
    try:
        if order.scale == "paper":
            return [named_place(recipe, order.data_dir) for recipe in experiment.paper]
        if order.data_dir is None:
            return [named_place(experiment.mini, None)]
        return [given_place(experiment.mini, order.data_dir, [recipe.dataset for recipe in experiment.paper])]
    except InputError as error:
        several = [recipe.dataset for recipe in experiment.paper] if order.scale == "paper" else []
        more = f" This suite has several data sets: --data-dir holds {_folders(several)}." if len(several) > 1 else ""
        raise InputError(error.code, f"suite {experiment.name}, scale {order.scale}: {error.message}{more}") from error


def jobs_of(experiment: Experiment, place: Place, order: Order) -> list[Job]:
    recipe, given = place.recipe, apply_settings({}, order.settings)
    columns: Sequence[Column] = (recipe.layout or experiment.layout)(_with_home(place.scene, given))
    _check_roles(columns, given)
    seeds = recipe.seeds if order.seeds is None else order.seeds
    # Jobs run side by side: inside of one, more processes would only get in each other's way.
    common = {"workers": 0, **recipe.settings, **place.data}

    def jobs(rows: Sequence[Row], last: Mapping[str, Any]) -> list[Job]:
        return list(grid(rows, columns, seeds, common, recipe.by_method, last, recipe.names))

    chosen = chosen_rows(experiment.rows, order.methods)
    # A mistyped key is an error even where nobody wants the rows of its method.
    left_out = [row for row in experiment.rows if row not in chosen and row.method in given]
    jobs(left_out, {row.method: given[row.method] for row in left_out})
    return jobs(chosen, given)


def _with_home(scene: Scene, given: Mapping[str, Any]) -> Scene:
    """With the home that the user chose."""
    home = given.get("home")
    if home is None:
        return scene
    if home not in scene.domains:
        raise InputError("config-value", f"--set home={home}: no such domain. {nearest(str(home), scene.domains)}")
    return replace(scene, home=home)


def _check_roles(columns: Sequence[Column], given: Mapping[str, Any]) -> None:
    """Columns are named by the domain that is held out, or has the labels: another one would be under a wrong name."""
    for role in ("target", "home"):
        named = dict.fromkeys(str(column.settings[role]) for column in columns if role in column.settings)
        if role in given and any(name != str(given[role]) for name in named):
            raise InputError(
                "config-value", f"--set {role}={given[role]}: this suite has its own {role}s: {', '.join(named)}"
            )


def _about_home(place: Place, jobs: Sequence[Job], order: Order) -> list[str]:
    """Which domain is the home, where one is for the whole table, and who chose it."""
    homes = list(dict.fromkeys(job.config.home for job in jobs))
    if len(homes) != 1 or homes[0] is None:
        return []
    is_chosen = homes[0] == place.recipe.home or "home" in apply_settings({}, order.settings)
    if is_chosen or order.data_dir is None:
        return [f"The home, which alone has labels, is {homes[0]}."]
    return [
        f"The home, which alone has labels, is {homes[0]}: the first of {', '.join(place.scene.domains)}."
        " Another one: --set home=NAME."
    ]


def about_skipped(records: Sequence[Record]) -> list[str]:
    """Whose numbers, and in which rows, are of what was learned without them."""
    rows: dict[str, dict[str, None]] = {}
    for record in records:
        rounds = max(record.rounds, default=1)
        for client in skipped_throughout({"counters": record.counters, "per_target": record.scores, "rounds": rounds}):
            rows.setdefault(client, {})[record.row] = None
    return [
        f"{client} was skipped in every round of {', '.join(own)}: there it is scored with what was learned without it."
        for client, own in sorted(rows.items())
    ]


def make_tables(experiment: Experiment, place: Place, records: Sequence[Record], scale: Scale) -> Iterator[Table]:
    shown = list(by_client(records)) if experiment.per_client else records
    printed = theirs(experiment, place.recipe.dataset) if scale == "paper" else {}
    homes = {record.home for record in records if record.home}
    at_home = f", home {homes.pop()}" if len(homes) == 1 else ""
    for rule, choose in MAIN_RULES.items():
        yield make_table(
            shown,
            choose,
            rule,
            f"{experiment.name} on {place.title}{at_home}",
            experiment.baseline,
            printed,
            [row.label for row in experiment.rows if find_about(row.method).is_bound],
        )


def by_client(records: Sequence[Record]) -> Iterator[Record]:
    """One record a client."""
    for record in records:
        for client, scores in record.scores.items():
            yield replace(record, column=client, target=client, scores={client: scores})


def theirs(experiment: Experiment, dataset: str) -> dict[str, dict[str, float]]:
    """What the paper printed for a data set: names of columns are `DATASET/COLUMN` where it has several."""
    printed = {**{row.label: row.theirs for row in experiment.rows if row.theirs}, **experiment.cited}
    several = len(experiment.paper) > 1
    found = {}
    for row, numbers in printed.items():
        own = {key.removeprefix(f"{dataset}/"): value for key, value in numbers.items()}
        found[row] = {key: value for key, value in own.items() if not several or f"{dataset}/{key}" in numbers}
    return {row: numbers for row, numbers in found.items() if numbers}


def printed(columns: Sequence[str], *numbers: float, dataset: str = "") -> dict[str, float]:
    """A line of a paper's table. One number more than columns is the average."""
    names = [*columns, AVERAGE][: len(numbers)]
    assert len(numbers) in (len(columns), len(columns) + 1), f"{len(numbers)} numbers for {columns}"
    return {f"{dataset}/{name}" if dataset else name: number for name, number in zip(names, numbers, strict=True)}


def _check_weights(jobs: Sequence[Job]) -> None:
    """Weights that are not there are an error before anything starts."""
    for arch, weights in {(job.config.arch, job.config.weights) for job in jobs}:
        if weights == "imagenet":
            imagenet_weights(arch)
        elif weights is not None and not Path(weights).is_file():
            raise InputError("weights-missing", f"there is no weights file {weights}")


def _needs(experiment: Experiment) -> dict[Scale, str]:
    words = []
    for recipe in experiment.paper:
        weights = f" and ImageNet weights of {' and '.join(_nets(recipe))}" if recipe.settings.get("weights") else ""
        words.append(f"{recipe.dataset}{weights}")
    return {
        "mini": f"nothing (built-in {experiment.mini.dataset}), or your own folders with --data-dir",
        "paper": f"{', '.join(words)}; --data-dir with {_folders([recipe.dataset for recipe in experiment.paper])}",
    }


def _nets(recipe: Recipe) -> list[str]:
    """Of the recipe, and those that rows call by name."""
    called = [recipe.names[name] for name in ("large", "small") if name in recipe.names]
    return list(dict.fromkeys([recipe.settings["arch"], *called]))


def _folders(names: Sequence[str]) -> str:
    assert all(name in PUBLIC for name in names), names
    return "its folder" if len(names) == 1 else f"a folder for each in it: {', '.join(names)}"


def _cost(experiment: Experiment) -> dict[Scale, str]:
    jobs = mini_jobs(experiment)
    runs = sum(
        len(experiment.rows) * len((recipe.layout or experiment.layout)(recipe.scene())) * len(recipe.seeds)
        for recipe in experiment.paper
    )
    nets = ", ".join(dict.fromkeys(net for recipe in experiment.paper for net in _nets(recipe)))
    return {
        "mini": f"{in_words(seconds_of(jobs) / (1 if experiment.alone else 2))} on 2 cores",
        "paper": f"{runs} trainings of {nets}: for GPUs",
    }


def mini_jobs(experiment: Experiment) -> list[Job]:
    order = Order("mini", Path(), Path())
    return jobs_of(experiment, named_place(experiment.mini, None), order)
