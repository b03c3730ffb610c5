"""`fedshift bench` and `list suites`: what they say to bad input, failures, half-written records and second runners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedshift
from fedshift.bench.records import read
from fedshift.errors import InputError

SHORT = ["--set", "rounds=1", "--set", "batch_size=8", "--set", "train_per_site=16"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fedshift", *(str(argument) for argument in arguments)]


def play(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment, timeout=280)


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
        ("copa/table1", {"jobs": 0}, ["1 is least"]),
        ("copa/table1", {"records": ["x.jsonl"]}, ["records are for the suite 'selection'"]),
        ("selection", {"records": ["x.jsonl"]}, ["there is no record file x.jsonl"]),
    ],
)
def test_bad_input_says_what_to_do(suite: str, arguments: dict[str, object], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        fedshift.benchmark(suite, out=tmp_path, **arguments)  # type: ignore[arg-type]
    assert all(word in caught.value.message for word in words), caught.value.message


def test_missing_domains_and_other_tasks_are_named(tiny_data: Path, tmp_path: Path) -> None:
    for domain in ("cartoon", "photo"):
        for name in ("dog", "house"):
            (tmp_path / "pacs" / domain / name).mkdir(parents=True)
            picture = tmp_path / "pacs" / domain / name / "1.png"
            picture.write_bytes(b"")
    with pytest.raises(InputError, match="lacks art_painting, sketch of pacs"):
        fedshift.benchmark("copa/table1", scale="paper", data_dir=tmp_path, out=tmp_path / "out")
    with pytest.raises(InputError, match=r"about segmentation.*holds data for classification"):
        fedshift.benchmark("dualadapt/table3", data_dir=tiny_data, out=tmp_path / "out")


def test_failures_are_listed_and_the_rest_is_there(tiny_data: Path, tmp_path: Path) -> None:
    """kd3a.drop of the only name that is no source in one of four columns."""
    done = play(
        "bench", "copa/table7", "--data-dir", tiny_data, "--methods", "copa,ind-paramavg", "--seeds", "0",
        "--out", tmp_path, *SHORT, "--set", "copa.magnitude=11",
    )  # fmt: skip
    assert done.returncode == 2 and "magnitude" in done.stderr, "a value that no run could take stops before the first"
    done = play(
        "bench", "kd3a/table6", "--data-dir", tiny_data, "--seeds", "0", "--out", tmp_path, *SHORT,
        "--set", "kd3a.drop=[dim]", "--methods", "KD3A w/o augmentation",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "1 trainings failed" in done.stdout and "'dim' is no source" in done.stdout
    assert "4/4" in done.stderr
    told = json.loads((tmp_path / "table.json").read_text())
    assert [failure["column"] for failure in told["failures"]] == ["dim"]
    cells = told["tables"][0]["rows"][0]["cells"]
    assert cells["amber"]["mean"] is not None and "dim" not in cells


def test_two_runners_on_one_folder_train_everything_once(tiny_data: Path, tmp_path: Path) -> None:
    arguments = command(
        "bench", "copa/table7", "--data-dir", tiny_data, "--methods", "ind-paramavg", "--seeds", "0,1", "--jobs", "1",
        "--out", tmp_path, *SHORT,
    )  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runners = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = [runner.communicate(timeout=280) for runner in runners]
    assert [runner.returncode for runner in runners] == [0, 0], outputs
    records, broken = read([tmp_path / "records.jsonl"])
    assert broken == 0 and len({record.job for record in records}) == 8
    assert outputs[0][0] == outputs[1][0], "both show the same table"
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("jobs/*/done")}
    (tmp_path / "records.jsonl").open("a").write('{"job": "cut')
    again = play(*arguments[3:])
    assert again.returncode == 0 and "1 half-written lines" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("jobs/*/done")} == times, "nothing was left to do"
