"""Methods compared on a user's own data, and one chosen without labels of the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inprocess import InProcess
from typer.testing import CliRunner

import fedshift
from fedshift.bench.auto import CANDIDATES, Choice, affordable, best_of, choose_method, keep_choice
from fedshift.bench.own import compare_methods, open_own, setting_of
from fedshift.bench.proposal import propose, write_proposal
from fedshift.bench.trees import ALONE, POOLED, auc
from fedshift.cli.app import app
from fedshift.data import DataSource, check_data
from fedshift.errors import InputError
from fedshift.report import write_report
from fedshift.runs.config import make_config, read_config

KEYS: dict[str, Any] = {
    "arch": "digits-csac",
    "batch_size": 16,
    "rounds": 1,
    "policy": {"min_samples": 2},
    "local_epochs": 1,
}


def remove_labels(path: Path) -> None:
    with np.load(path) as found:
        kept = {key: found[key] for key in found.files if "labels" not in key}
    np.savez(path, **kept)


@pytest.fixture(scope="module")
def clinics(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sites with labels, and `dim` without."""
    folder = Path(shutil.copytree(tiny_data, tmp_path_factory.mktemp("own") / "clinics"))
    remove_labels(folder / "dim.npz")
    return folder


def test_each_labelled_site_is_held_out_from_every_method(clinics: Path, tmp_path: Path) -> None:
    launcher = InProcess()
    found = compare_methods(["fedavg", "fedomg"], {**KEYS, "data_dir": clinics}, tmp_path, jobs=1, launcher=launcher)
    labelled = open_own({"data_dir": clinics}).labelled
    assert "dim" not in labelled and len(labelled) >= 2
    assert {(r.row, r.column) for r in found.records} == {(m, s) for m in ("fedavg", "fedomg") for s in labelled}
    for record in found.records:
        assert record.target == record.column and set(record.sources) == set(labelled) - {record.column}
    assert found.tables[0].cells["fedomg"]["average"].mean is not None and found.failures == ()
    assert (tmp_path / "table.md").read_text().count("| fedavg |") == 2, "one table per rule"
    again = InProcess()
    compare_methods(["fedavg", "fedomg"], {**KEYS, "data_dir": clinics}, tmp_path, jobs=1, launcher=again)
    assert len(launcher.trained) == 2 * len(labelled) and again.trained == [], "what is trained is not trained again"


def test_what_cannot_be_compared_is_refused(clinics: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'dim' has no labels, so nothing can be compared on it"):
        compare_methods(["fedavg"], {**KEYS, "data_dir": clinics, "target": "dim"}, tmp_path)
    with pytest.raises(InputError, match=r"no setting in common \(copa: generalize; kd3a: adapt\)"):
        setting_of(["copa", "kd3a"], None)
    with pytest.raises(InputError, match="copa is for generalize, not for adapt"):
        setting_of(["fedavg", "copa"], "adapt")
    assert setting_of(["fedavg", "kd3a"], None) == "adapt" and setting_of(["fedavg"], "adapt") == "adapt"


def test_the_budget_decides_on_methods_sites_and_rounds() -> None:
    factors = {"fedavg": 1.0, "csac": 1.6, "copa": 2.8}
    methods, sites, rounds, taken = affordable(factors, 3, 10.0, 10_000, 2, 20)
    assert (methods, sites, rounds) == (["fedavg", "csac", "copa"], 3, 20)
    # 3 sites x (3 x 4 s + 20 x 10 s x 5.4) by two, and 20 x 10 s x 2.8 x 4 / 3 by two.
    assert taken == pytest.approx((3 * (12 + 1080) + 746.667) / 2, abs=0.1)
    methods, sites, rounds, taken = affordable(factors, 3, 10.0, 400, 2, 20)
    assert methods == ["fedavg", "csac"] and sites == 3 and rounds >= 5 and taken <= 400
    assert affordable(factors, 3, 10.0, 1, 2, 20)[2] == 1, "something is trained however small the budget"


def test_another_method_has_to_be_better_than_chance_allows() -> None:
    scores = {"fedavg": {"a": 0.70, "b": 0.60}, "copa": {"a": 0.71, "b": 0.60}}
    assert best_of(scores)[0] == "fedavg" and "only 0.5 points" in best_of(scores)[1]
    scores["csac"] = {"a": 0.70, "b": 0.64}
    assert best_of(scores) == ("csac", "the mean over 2 held-out sites is 67.0 %, 2.0 points above fedavg")


def test_auto_never_reads_the_target(clinics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANDIDATES, "generalize", ("fedavg", "fedomg"))
    data = Path(shutil.copytree(clinics, tmp_path / "clinics"))
    values = {**KEYS, "data_dir": data, "target": "dim"}
    chosen = choose_method(values, tmp_path / "auto", minutes=60, jobs=1, launcher=InProcess())
    assert chosen.method in chosen.scores and "dim" not in next(iter(chosen.scores.values()))
    trial = json.loads((tmp_path / "auto" / "trial.json").read_text())
    assert trial["methods"][0] == "fedavg" and "dim" not in trial["sites"] and trial["rounds"] == 1
    for record in chosen.comparison.records if chosen.comparison else ():
        assert "dim" not in (*record.sources, record.target)
    # The same search with other pictures at the target goes on where it was: nothing is trained again.
    launcher = InProcess()
    with np.load(data / "dim.npz") as found:
        np.savez(data / "dim.npz", **{key: 255 - found[key] for key in found.files})
    assert choose_method(values, tmp_path / "auto", minutes=60, jobs=1, launcher=launcher).scores == chosen.scores
    assert launcher.trained == []


def test_the_report_shows_how_the_method_was_chosen(clinics: Path, tmp_path: Path) -> None:
    run = fedshift.fit("fedavg", data=clinics, target="dim", workers=0, out=tmp_path / "run", **KEYS)
    keep_choice(Choice("fedavg", "it was <best>", 1, {"fedavg": {"blue": 0.5}}, {"copa": "too dear"}), run.path)
    write_report([run.path], tmp_path / "report.html", features=False)
    page = (tmp_path / "report.html").read_text()
    assert "How the method was chosen" in page and "it was &lt;best&gt;" in page and "too dear" in page
    (run.path / "choice.json").write_text("{")
    write_report([run.path], tmp_path / "report.html", features=False)
    assert "How the method was chosen" not in (tmp_path / "report.html").read_text()


def test_with_one_labelled_site_there_is_nothing_to_choose_by(clinics: Path, tmp_path: Path) -> None:
    chosen = choose_method({**KEYS, "data_dir": clinics, "sources": ["blue"], "target": "dim"}, tmp_path)
    assert chosen.method == "fedavg" and "nothing to choose by" in chosen.reason
    with pytest.raises(InputError, match="method auto is for generalize and adapt"):
        choose_method({**KEYS, "data_dir": clinics, "home": "blue"}, tmp_path)


def test_init_proposes_a_configuration_that_trains(clinics: Path, tmp_path: Path) -> None:
    found = propose(check_data(DataSource(None, clinics)), clinics, None, 5.0)
    values = {key: value for key, value, _ in found.lines}
    assert values["setting"] == "adapt" and values["target"] == "dim" and values["method"] == "auto"
    assert all(reason for _, _, reason in found.lines)
    write_proposal(found, tmp_path / "fedshift.yaml")
    read = read_config(tmp_path / "fedshift.yaml")
    assert read == values
    make_config({**{key: value for key, value in read.items() if key != "budget"}, "method": "fedavg"})


def test_init_on_the_command_line(tiny_data: Path, clinics: Path, tmp_path: Path) -> None:
    out, call = tmp_path / "fedshift.yaml", CliRunner().invoke
    done = call(app, ["init", str(tiny_data), "--out", str(out)])
    assert done.exit_code == 0 and f"fedshift train {out}" in done.stdout and "setting: generalize" in out.read_text()
    assert isinstance(call(app, ["init", str(tiny_data), "--out", str(out)]).exception, InputError)
    empty = call(app, ["init", str(tmp_path), "--out", str(tmp_path / "other.yaml")])
    assert empty.exit_code == 2 and not (tmp_path / "other.yaml").exists()
    done = call(app, ["train", str(out), "--method", "fedavg", "--budget", "3", "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, InputError) and "budget" in str(done.exception)


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Three tables in which one column decides, and one is missing at a site."""
    folder, rng = tmp_path / "hospitals", np.random.default_rng(0)
    folder.mkdir()
    for site in ("a", "b", "c"):
        rows = []
        for _ in range(60):
            x = float(rng.normal())
            rows.append(f"{x:.3f},{'' if site == 'b' else 1},{'FM'[int(rng.integers(2))]},{int(x > 0) * 3}")
        (folder / f"{site}.csv").write_text("\n".join(["x,extra,sex,grade", *rows]) + "\n")
    (folder / "columns.yaml").write_text("label: grade\npositive: [1, 2, 3]\n")
    return folder


def test_tables_are_compared_with_trees_and_by_auc(hospitals: Path, tmp_path: Path) -> None:
    values = {"data_dir": hospitals, "target": "a", "rounds": 4, "policy": {"min_samples": 2}, "batch_size": 8}
    found = compare_methods(["fedavg", "copa"], values, tmp_path / "out", jobs=1, launcher=InProcess())
    assert found.failures == (), "copa chooses keys for tables by itself"
    accuracy, _, area = found.tables
    assert list(accuracy.cells) == ["fedavg", "copa", ALONE, POOLED] and "AUC" in area.title
    # Trees find the only column that decides, and go without one that is missing in all rows.
    assert (accuracy.cells[POOLED]["average"].mean or 0) > 0.9 and (area.cells[POOLED]["average"].mean or 0) > 0.95
    assert (area.cells["fedavg"]["average"].mean or 0) > 0.9
    config = read_config(next((tmp_path / "out" / "jobs").glob("*/config.yaml")))
    assert config["method"] in ("fedavg", "copa")


def test_auc_counts_pairs() -> None:
    # Of the pairs (0.8, 0.1), (0.8, 0.4), (0.4, 0.1), (0.4, 0.4) three are in order and one is a tie.
    assert auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])) == 3.5 / 4
    assert auc(np.array([0.1, 0.4]), np.array([1, 1])) == 0.5
