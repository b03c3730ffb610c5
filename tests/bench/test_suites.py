"""Every suite plays: a round, a seed, two columns of tiny data. And its table is what suites promise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from here import Here
from PIL import Image

from fedshift.bench.estimate import TRAINING_PICTURES, seconds_of
from fedshift.bench.experiment import Experiment, jobs_of, mini_jobs, run_experiment, theirs
from fedshift.bench.jobs import Column
from fedshift.bench.layouts import Layout, Scene, each_target
from fedshift.bench.places import Place
from fedshift.bench.publish import write_tables
from fedshift.bench.recipes import Recipe
from fedshift.bench.suite import Found, Order
from fedshift.bench.suites import EXPERIMENTS, SUITES
from fedshift.bench.suites.__main__ import written
from fedshift.data import DataSource, open_dataset
from fedshift.methods import METHODS

TINY = (
    "rounds=1",
    "train_per_site=16",
    "batch_size=8",
    "lr=0.02",
    "local_epochs=1",
    "evaluate_every=1",
    "client_fraction=1.0",
    'policy={"min_samples": 2}',
    "csac.acquisition_epochs=1",
    "csac.calibration_epochs=1",
    "dualadapt.pretrain_epochs=1",
    "fed-oracle.pretrain_epochs=1",
    "fed-mcd.repeats=1",
    "cent-mcd.repeats=1",
    "fada.sync_batches=1",
)


@pytest.fixture(scope="session")
def tiny_streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cities of stripes with masks."""
    root = tmp_path_factory.mktemp("streets")
    rng = np.random.default_rng(0)
    for number, city in enumerate(("east", "north", "west")):
        for kind in ("images", "masks"):
            (root / city / kind).mkdir(parents=True)
        for name in range(30):
            mask = (np.arange(32)[:, None] // 4 + rng.integers(0, 3)) % 3 + np.zeros((32, 32), int)
            picture = mask[..., None] * 80 + number * 20 + rng.integers(0, 20, (32, 32, 3))
            Image.fromarray(picture.astype(np.uint8)).save(root / city / "images" / f"{name}.png")
            Image.fromarray(mask.astype(np.uint8)).save(root / city / "masks" / f"{name}.png")
    return root


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Suites share what they train."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(autouse=True)
def _nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting operations takes longer than these trainings, and has tests of its own."""
    monkeypatch.setattr("fedshift.runs.execute.flops_per_sample", lambda config, dataset: 1.0)


def fewer_columns(layout: Layout) -> Layout:
    """The first and the last; of those that only differ in the target, the first."""

    def cut(scene: Scene) -> Sequence[Column]:
        columns = layout(scene)
        return columns[:1] if layout is each_target else [columns[0], columns[-1]] if len(columns) > 1 else columns

    return cut


def cut_down(experiment: Experiment) -> Experiment:
    mini = replace(experiment.mini, seeds=(0,), layout=None)
    return replace(experiment, mini=mini, layout=fewer_columns(experiment.mini.layout or experiment.layout))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=[e.name for e in EXPERIMENTS])
def test_every_grid_plays(
    experiment: Experiment, tiny_data: Path, tiny_streets: Path, work: Path, tmp_path: Path
) -> None:
    data = tiny_streets if experiment.mini.dataset == "streets" else tiny_data
    order = Order("mini", tmp_path, work, data_dir=data, settings=TINY, launcher=Here())
    found = run_experiment(cut_down(experiment), order)
    assert [f"{f.job.row}: {f.words}" for f in found.failures] == []
    assert {record.row for record in found.records} == {row.label for row in experiment.rows}
    _check_written(experiment.name, order, found)
    for table in found.tables:
        assert all(
            cell.mean is not None and cell.theirs is None for own in table.cells.values() for cell in own.values()
        )


def _check_written(name: str, order: Order, found: Found) -> None:
    paths = write_tables(SUITES[name], order, found)
    assert {path.suffix for path in paths} == {".txt", ".md", ".csv", ".tex", ".json"}
    told = json.loads((order.out / "table.json").read_text())
    assert told["suite"] == name and told["tables"] and told["failures"] == []
    assert all(path.is_file() and path.stat().st_size > 1000 for path in found.files)


@pytest.mark.parametrize("name", [name for name in SUITES if name not in {e.name for e in EXPERIMENTS}])
def test_every_function_plays(name: str, tiny_data: Path, work: Path, tmp_path: Path) -> None:
    # Of a table that counts operations one row is enough: each takes seconds.
    methods = ("dualadapt",) if name == "dualadapt/table4" else None
    order = Order("mini", tmp_path, work, tiny_data, methods=methods, launcher=Here())
    own = {"kd3a/fig5": ("leakage.steps=2", "leakage.trials=1"), "csac/fig4": ("parameters.models=2",)}
    trained = {row.method for row in SUITES[name].rows}
    tiny = [setting for setting in TINY if (section := setting.split(".")[0]) not in METHODS or section in trained]
    settings = () if name == "dualadapt/table4" else (*tiny, *own.get(name, ()))
    found = SUITES[name].run(replace(order, settings=settings))
    assert [f"{f.job.row}: {f.words}" for f in found.failures] == []
    _check_written(name, order, found)


def test_all_data_sets_of_a_suite_have_the_same_seeds() -> None:
    """Whether a call has other seeds than the suite is asked once for all of them."""
    assert all(recipe.seeds == experiment.paper[0].seeds for experiment, recipe in PAPER_RECIPES)


def test_there_is_a_suite_for_every_table_and_figure() -> None:
    tables = {"copa": (1, 2, 3, 4, 5, 6, 7), "csac": (1, 2, 3, 4, 5, 6), "kd3a": (1, 2, 3, 6, 7, 8)}
    figures = {"copa": (2, 3, 4), "csac": (4, 5, 6, 7, 8, 9), "kd3a": (3, 4, 5), "dualadapt": (4,)}
    wanted = {f"{paper}/table{n}" for paper, numbers in tables.items() for n in numbers}
    wanted |= {f"dualadapt/table{n}" for n in (1, 2, 3, 4, 5)} | {"selection"}
    wanted |= {f"{paper}/fig{n}" for paper, numbers in figures.items() for n in numbers}
    assert wanted <= set(SUITES)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=[e.name for e in EXPERIMENTS])
def test_mini_takes_less_than_half_an_hour_by_its_estimate(experiment: Experiment) -> None:
    assert seconds_of(mini_jobs(experiment)) / (1 if experiment.alone else 2) < 1800


@pytest.mark.parametrize("name", ["digits", "rotated-digits", "streets"])
def test_recipes_know_the_built_in_data(name: str) -> None:
    known = open_dataset(DataSource(name))
    for recipe in (e.mini for e in EXPERIMENTS if e.mini.dataset == name):
        assert recipe.domains == known.domains and set(recipe.targets) <= set(known.domains)
        assert not recipe.home or recipe.home in known.domains
    assert TRAINING_PICTURES[name] == len(known.load(known.domains[0]).train)


PAPER_RECIPES = [(e, r) for e in EXPERIMENTS for r in e.paper]


@pytest.mark.parametrize(
    ("experiment", "recipe"), PAPER_RECIPES, ids=[f"{e.name}-{r.dataset}" for e, r in PAPER_RECIPES]
)
def test_the_papers_scale_is_configured_and_printed_as_it_is_laid_out(experiment: Experiment, recipe: Recipe) -> None:
    place = Place(recipe.dataset, recipe, {"dataset": recipe.dataset, "data_dir": "/data"}, recipe.scene())
    jobs = jobs_of(experiment, place, Order("paper", Path(), Path()))
    assert {job.config.seed for job in jobs} == set(recipe.seeds)
    assert all(job.config.train_per_site is None for job in jobs), "the whole data set"
    columns = {job.column for job in jobs}
    if experiment.per_client:
        columns = set(recipe.domains) - {recipe.scene().home}
    for row, numbers in theirs(experiment, recipe.dataset).items():
        if experiment.tables:
            assert set(numbers) <= columns | {"average"}, row


def test_printed_averages_are_those_of_the_printed_numbers() -> None:
    """Papers round, and two of their averages are a quarter of a point off; a mistyped number would be further."""
    checked = 0
    for experiment, recipe in PAPER_RECIPES:
        for row, numbers in theirs(experiment, recipe.dataset).items():
            single = [value for column, value in numbers.items() if column != "average"]
            if single and "average" in numbers:
                assert numbers["average"] == pytest.approx(fmean(single), abs=0.26), f"{experiment.name}: {row}"
                checked += 1
    assert checked > 150


def test_the_page_lists_the_suites_there_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
    assert written(page.read_text()) == page.read_text(), "python -m fedshift.bench.suites docs/benchmarks.md"
