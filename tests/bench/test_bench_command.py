"""`fedshift bench` and `list suites`: bad input, overrides, failures, half-written records and several runners."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from inprocess import InProcess
from PIL import Image
from tinydata import write_domain
from typer.testing import CliRunner

import fedshift
from fedshift.bench.jobs import Column, Row, grid_jobs
from fedshift.bench.overrides import folder_of
from fedshift.bench.papers import SUITES
from fedshift.bench.records import read
from fedshift.bench.run import Processes, run_jobs, silent
from fedshift.bench.suite import SuiteRequest
from fedshift.cli.app import app
from fedshift.errors import SITE_FAILED, InputError

SHORT = ["--set", "rounds=1", "--set", "batch_size=8", "--set", "train_per_site=16"]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Replaces processes by trainings in this one."""
    here = InProcess()
    monkeypatch.setattr(Processes, "train", lambda self, *arguments: here.train(*arguments))
    return here


def play(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_settings_may_be_a_dictionary_in_python(launcher: InProcess, tiny_data: Path, tmp_path: Path) -> None:
    keys = {"rounds": 1, "batch_size": 8, "train_per_site": 16, "copa.ops": 1}
    found = fedshift.benchmark(
        "copa/table7", data_dir=tiny_data, seeds=[0], methods=["COPA"], settings=keys, out=tmp_path
    )
    settings = found.records[0].settings
    assert settings["rounds"] == 1 and settings["copa"]["ops"] == 1


def test_two_suites_in_one_call_are_an_error() -> None:
    result = play("bench", "copa/table7", "copa/table1")
    assert isinstance(result.exception, InputError) and "one suite per call" in result.exception.message


def test_suites_are_listed_for_programs() -> None:
    listed = json.loads(play("list", "suites", "--json").stdout)
    assert {"name", "paper", "needs", "cost", "question"} <= set(listed[0])
    assert all(row["needs"] and row["cost"] for row in listed)


@pytest.mark.parametrize(
    ("suite", "arguments", "words"),
    [
        ("copa/table1", {"scale": "paper"}, ["Get pacs from https://", "--data-dir", "Domains: art_painting"]),
        ("csac/table4", {"scale": "paper"}, ["Get pacs from", "a folder for each in it: pacs, vlcs"]),
        ("copa/table1", {"data_dir": "nowhere"}, ["there is no folder nowhere"]),
        ("copa/tabel1", {}, ["Did you mean 'copa/table1'?"]),
        ("copa/table1", {"methods": ["kopa"]}, ["has no 'kopa'", "'copa'"]),
        ("copa/table1", {"jobs": 0}, ["must be 1 or more"]),
        ("copa/table1", {"settings": ["freeze_norm=true"]}, ["freeze_norm", "--weights imagenet"]),
        ("copa/table1", {"records": ["x.jsonl"]}, ["records are for the suite 'selection'"]),
        ("selection", {"records": ["x.jsonl"]}, ["there is no record file x.jsonl"]),
    ],
)
def test_bad_input_says_what_to_do(suite: str, arguments: dict[str, object], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        fedshift.benchmark(suite, out=tmp_path, **arguments)  # type: ignore[arg-type]
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("suite", "asked", "words"),
    [
        ("dualadapt/table1", ["--set", "copa.nonsense=1"], "does not train copa. It trains adabn, cent-mcd,"),
        ("kd3a/fig5", ["--set", "kd3a.gate=0.8"], "does not train kd3a. It trains no method"),
        (
            "dualadapt/table1",
            ["--set", "dualadapt.lamda_st=3", "--methods", "source-only"],
            "unknown key dualadapt.lamda_st. Did you mean 'lambda_st'?",
        ),
        ("dualadapt/table1", ["--set", "fed-mcd.repeats=many", "--methods", "source-only"], "fed-mcd.repeats: "),
        ("dualadapt/table1", ["--set", "home=paper"], "--set home=paper: no such domain."),
        ("dualadapt/table2", ["--set", "home=photo"], "this suite has its own homes: handwritten, photo,"),
        ("copa/table1", ["--set", "target=photo"], "this suite has its own targets: handwritten, photo,"),
        ("dualadapt/table4", ["--set", "rounds=2"], "--set rounds=2: this suite trains nothing"),
        ("dualadapt/table4", ["--methods", "copa"], "this suite has no 'copa'"),
        ("csac/fig4", ["--methods", "csac"], "this suite has no 'csac'"),
        ("csac/fig4", ["--seeds", "0,1"], "--seeds 0,1: csac/fig4 is a picture of one seed. Call it once per seed"),
        ("kd3a/fig5", ["--seeds", "1,0"], "--seeds 0,1: kd3a/fig5 is a picture of one seed. Call it once per seed"),
        ("selection", ["--records", "x.jsonl", "--seeds", "0"], "with records nothing is trained"),
    ],
)
def test_what_would_change_nothing_is_an_error(
    suite: str, asked: list[str], words: str, launcher: InProcess, tmp_path: Path
) -> None:
    done = play("bench", suite, "--out", tmp_path, *asked)
    assert isinstance(done.exception, InputError) and done.exception.exit_code == 2
    assert words in done.exception.message, done.exception.message
    assert launcher.trained == [] and not (tmp_path / "table.txt").exists()


TABLE_1 = ("bench", "dualadapt/table1", "--methods", "source-only", "--jobs", "1", *SHORT)


def test_tables_tell_which_clients_were_skipped(launcher: InProcess, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("amber", "blue", "coral"):
        write_domain(data, name, train=8 if name == "coral" else 40)
    asked = ("--methods", "source-only,fed-dan", "--seeds", "0", "--set", "client_fraction=1", "--data-dir", data)
    done = play("bench", "dualadapt/table1", "--jobs", "1", *SHORT, *asked, "--out", tmp_path / "out")
    told = (
        "coral was skipped in every round of Fed-DAN, Fed-DAN (own statistics): its scores there are of models trained"
    )
    told += " without it."
    assert done.exit_code == 0 and told in done.stdout, done.output
    assert told in json.loads((tmp_path / "out" / "table.json").read_text())["notes"]


def test_tables_tell_what_was_changed_and_leave_those_of_the_suite_alone(
    launcher: InProcess, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*TABLE_1, "--set", "client_fraction=1", "--set", 'policy={"min_samples": 2}', "--data-dir", tiny_data)
    done = play(*asked, "--seeds", "0")
    assert done.exit_code == 0, done.output
    (folder,) = {path.parent for path in Path("runs/bench/dualadapt/table1").rglob("table.*")}
    assert f"tables: {folder / 'table'}.txt" in done.stdout and folder.name.startswith(tiny_data.name)
    gave = 'Not the unchanged suite. This call gave --set batch_size=8, client_fraction=1, policy={"min_samples": 2},'
    gave += " rounds=1, train_per_site=16; --methods source only; --seeds 0."
    home = "The home, the only domain with labels, is amber: the first of amber, blue, coral, dim."
    home += " Choose another with --set home=NAME."
    for name in ("txt", "md", "tex"):
        page = (folder / f"table.{name}").read_text()
        assert gave in page and home in page and "scale mini, changed:" in page
        assert f"dualadapt/table1 on {tiny_data.name}, home amber; round: last." in page
    told = json.loads((folder / "table.json").read_text())
    assert told["changed"]["settings"]["rounds"] == "1" and told["notes"][0] == gave
    assert told["changed"]["methods"] == ["source only"] and told["changed"]["seeds"] == [0]
    assert gave in done.stdout and home in done.stdout

    trained = len(launcher.trained)
    again = play(*asked, "--seeds", "0", "--set", "home=coral")
    assert len(launcher.trained) == trained + 1, "another home is another training"
    assert (
        "The home, the only domain with labels, is coral." in again.stdout and "home coral; round: last" in again.stdout
    )
    told = [json.loads(path.read_text()) for path in Path("runs/bench/dualadapt/table1").glob("*/table.json")]
    assert sorted(column for one in told for column in one["tables"][0]["columns"] if column in ("amber", "coral")) == [
        "amber",
        "coral",
    ]


def folder(suite: str, **given: Any) -> str:
    return folder_of(SUITES[suite], SuiteRequest(**{"scale": "mini", "out": Path(), "work": Path()} | given))


def test_only_the_suite_as_it_is_is_in_its_own_folder(tmp_path: Path) -> None:
    suite = SUITES["dualadapt/table1"]
    everything = tuple(row.method for row in suite.rows)
    assert folder(suite.name) == folder(suite.name, seeds=(2, 1, 0), methods=everything) == suite.name
    assert folder("dualadapt/table4", seeds=(7,)) == "dualadapt/table4", "counting needs no seed"
    calls: list[dict[str, Any]] = [
        {"seeds": (0, 1)},
        {"methods": ("dualadapt",)},
        {"settings": ("rounds=1",)},
        {"settings": ("rounds=2",)},
        {"data_dir": tmp_path},
        {"scale": "paper", "data_dir": tmp_path},
    ]
    found = [folder(suite.name, **call) for call in calls]
    assert len(set(found)) == len(calls) and all(Path(name).parent == Path(suite.name) for name in found)
    both = ("rounds=1", "lr=0.1")
    assert folder(suite.name, settings=both) == folder(suite.name, settings=both[::-1])
    assert folder(suite.name, settings=both).startswith("dualadapt/table1/lr-0.1-rounds-1-")
    many = tuple(f"name={'../' * 50}{number}" for number in range(3))
    assert folder(suite.name, settings=many).count("/") == 2 and len(folder(suite.name, settings=many)) < 80


def test_missing_domains_and_other_tasks_are_named(tiny_data: Path, tmp_path: Path) -> None:
    for domain in ("cartoon", "photo"):
        for name in ("dog", "house"):
            (tmp_path / "pacs" / domain / name).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(tmp_path / "pacs" / domain / name / "1.png")
    with pytest.raises(InputError, match="lacks art_painting, sketch of pacs"):
        fedshift.benchmark("copa/table1", scale="paper", data_dir=tmp_path, out=tmp_path / "out")
    with pytest.raises(InputError, match=r"about segmentation.*holds data for classification"):
        fedshift.benchmark("dualadapt/table3", data_dir=tiny_data, out=tmp_path / "out")


def test_failures_are_listed_and_the_rest_is_there(launcher: InProcess, tiny_data: Path, tmp_path: Path) -> None:
    """In one of four columns, the dropped source is the target."""
    asked = ["bench", "kd3a/table6", "--data-dir", tiny_data, "--seeds", "0", "--out", tmp_path, "--jobs", "1", *SHORT]
    asked += ["--set", "kd3a.drop=[dim]", "--methods", "KD3A w/o augmentation"]
    done = play(*asked)
    assert done.exit_code == SITE_FAILED
    assert "1 training failed" in done.stdout and "'dim' is no source" in done.stdout
    assert "4/4" in done.stderr
    told = json.loads((tmp_path / "table.json").read_text())
    assert [failure["column"] for failure in told["failures"]] == ["dim"]
    cells = told["tables"][0]["rows"][0]["cells"]
    assert cells["amber"]["mean"] is not None and "dim" not in cells

    (tmp_path / "records.jsonl").open("a").write('{"job": "cut')
    trained = len(launcher.trained)
    again = play(*asked)
    assert "1 half-written line in the records" in again.stdout
    assert len(launcher.trained) == trained + 1, "what had failed is tried again, the rest is there"


def test_two_runners_on_one_folder_train_everything_once(tiny_data: Path, tmp_path: Path) -> None:
    common = {"data_dir": str(tiny_data), "rounds": 1, "batch_size": 8, "arch": "digits-copa", "workers": 0}
    columns = [Column(target, {"target": target}) for target in ("amber", "blue", "coral")]
    jobs = list(grid_jobs([Row("FedAvg", "fedavg")], columns, [0], common, {}))
    here = InProcess()
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: run_jobs(jobs, tmp_path, 2, silent, here), range(2))
    assert sorted(here.trained) == sorted(job.digest for job in jobs)
    assert first.records == second.records and first.failures == second.failures == []
    records, broken = read([tmp_path / "records.jsonl"])
    assert broken == 0 and {record.job for record in records} == {job.digest for job in jobs}
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(jobs), "one line per training, whichever runner trained it"


def test_a_folder_that_another_process_trains_in_is_waited_for(tiny_data: Path, tmp_path: Path) -> None:
    """The second runner is another process: locks have to hold between processes too."""
    common = {"data_dir": str(tiny_data), "rounds": 1, "batch_size": 8, "arch": "digits-copa", "workers": 0}
    (job,) = grid_jobs([Row("FedAvg", "fedavg")], [Column("dim", {"target": "dim"})], [0], common, {})
    (tmp_path / "wanted").mkdir()
    holds = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True);"
    lock = tmp_path / "wanted" / f"{job.digest}.lock"
    other = subprocess.Popen(
        [sys.executable, "-c", holds + " sys.stdin.read()", str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == b"held\n"
    here = InProcess()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_jobs, [job], tmp_path, 1, silent, here)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        assert here.trained == []
        other.stdin.close()
        assert len(waiting.result(timeout=200).records) == 1
    other.wait()
