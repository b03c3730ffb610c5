"""Every suite plays: a round, a seed, two columns of tiny data. And its table is what suites promise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshift.bench.experiment import Experiment, run_experiment
from fedshift.bench.jobs import Column
from fedshift.bench.layouts import Layout, Scene, each_target
from fedshift.bench.publish import write_tables
from fedshift.bench.suite import Found, Order
from fedshift.bench.suites import EXPERIMENTS, SUITES
from fedshift.errors import FedshiftError
from fedshift.runs.config import make_config, read_config
from fedshift.runs.execute import run

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


class Here:
    """Trains in this process: a suite has hundreds of jobs, and starting one takes longer than a tiny training."""

    def train(self, config: Path, folder: Path, log: Path, threads: int) -> int:
        try:
            run(make_config(read_config(config)), folder, resume=True)
        except FedshiftError as error:
            log.write_text(error.message)
            return error.exit_code
        return 0

    def stop(self) -> None:
        return None


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
