"""The commands as users type them: exit codes and what they print."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

import fedshift
from fedshift import cli
from fedshift.cli import catalogue
from fedshift.cli.app import PANELS, app
from fedshift.federation.releases import kinds
from fedshift.methods import METHODS, find_about, find_method
from fedshift.nn.archs import ARCHS

SLOW = ("torch", "sklearn", "matplotlib", "numpy", "jinja2", "yaml", "pydantic")


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, columns: int = 200
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `fedshift WORDS`."""
    monkeypatch.setattr(sys, "argv", ["fedshift", *words])
    monkeypatch.setenv("COLUMNS", str(columns))
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    out = tmp_path_factory.mktemp("trained") / "run"
    keys = {"data_dir": tiny_data, "target": "dim", "rounds": 6, "batch_size": 8, "arch": "digits-copa", "workers": 0}
    return fedshift.fit("fedavg", out=out, policy={"min_samples": 2}, **keys)


def loaded_by(*words: str) -> tuple[str, set[str]]:
    """What `fedshift WORDS` prints in a new process, and which slow packages it has imported at the end."""
    code = f"import sys; sys.argv = {['fedshift', *words]!r}\n"
    code += "try:\n import fedshift.cli as c; c.main()\nexcept SystemExit: pass\n"
    code += f"print(*[name for name in {SLOW!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["list", "methods"], ["list", "suites", "--json"]])
def test_help_and_lists_load_nothing_slow(words: list[str]) -> None:
    """Importing torch takes seconds; these answers must not need it."""
    shown, slow = loaded_by(*words)
    # Recent versions of typer import pydantic to read the arguments of a command.
    allowed = set() if words == ["--help"] else {"pydantic"}
    assert len(shown) > 200 and slow <= allowed


def test_help_shows_every_command_in_its_panel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown, _ = call(monkeypatch, capsys, "--help", columns=120)
    panels: dict[str, list[str]] = {}
    for line in shown.splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            panels[title[1]] = []
        elif panels and (name := re.match(r"│ ([a-z][a-z-]*) ", line)):
            panels[list(panels)[-1]].append(name[1])
    panels.pop("Options")
    assert list(panels) == ["Data", "Train", "Use", "Compare", "Trust", "Real machines"]
    assert {panel: tuple(names) for panel, names in panels.items()} == PANELS
    first = {panel: names[0] for panel, names in PANELS.items()}
    assert first["Train"] == "train" and first["Data"] == "init", "the most used command stands first"
    listed = [name for names in PANELS.values() for name in names]
    commands = set(vars(get_command(app))["commands"])
    assert sorted(listed) == sorted(commands), "put every command of the application in one panel of cli.app.PANELS"


def test_the_packaged_catalogue_is_up_to_date() -> None:
    fresh = catalogue.as_text(catalogue.built_in())
    assert catalogue.FILE.read_text() == fresh, (
        "out of date: run `python -m fedshift.cli.catalogue` and commit the file"
    )


def test_names_that_an_installed_package_adds_are_listed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedshift.nets]\ntheir-net = somebody:NET\n")
    (tmp_path / "somebody.py").write_text("def NET(classes):\n    'A net of somebody.'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ARCHS, "_offered", None)
    monkeypatch.setattr(ARCHS, "_values", dict(ARCHS._values))
    _, output, _ = call(monkeypatch, capsys, "list", "archs", "their", "--json")
    assert [(row["name"], row["description"]) for row in json.loads(output)] == [("their-net", "A net of somebody.")]
    assert catalogue.listed("methods"), "no package adds methods: they come from the file"
    assert "their-net" not in [row["name"] for row in catalogue.built_in()["archs"]]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["train", "--method", "fedavgg", "--dataset", "digits"], "unknown-name", "Did you mean 'fedavg'"),
        (["train", "--dataset", "digit"], "unknown-name", "digits"),
        (["train", "--data-dir", "/nowhere/at/all"], "data-missing", "/nowhere/at/all"),
        (["train", "--dataset", "digits", "--target", "foto"], "unknown-name", "Did you mean 'photo'"),
        (["train", "--dataset", "digits", "--target", "photo", "--arch", "vgg"], "unknown-name", "architecture 'vgg'"),
        (["train", "--dataset", "digits", "--set", "learning_rate=1"], "config-key", "learning_rate"),
        (["train", "--method", "fed-dan", "--set", "fed-dan.weight=abc"], "config-value", '"abc" is not a number'),
        (["train", "missing.yaml"], "data-missing", "missing.yaml"),
        (["predict", "no-such-run", "."], "run-missing", "no-such-run"),
        (["report", "no-such-run"], "run-missing", "no-such-run"),
        (["privacy", "nothing"], "unknown-name", "nothing"),
        (["ui", "no-such-folder"], "data-missing", "no-such-folder"),
        (["train", "--dataset", "digits", "--target", "photo", "--track", "mlfow"], "unknown-name", "'mlflow'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: str, says: str
) -> None:
    status, _, errors = call(monkeypatch, capsys, *words)
    assert status == 2
    assert f"error [{code}]" in errors and says in errors
    assert "Traceback" not in errors and len(errors.strip().splitlines()) == 1


def test_train_writes_a_run_and_shows_its_table(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("method: FedAvg\narch: digits-csac\nrounds: 9\npolicy: {min_samples: 2}\nworkers: 0\n")
    out = tmp_path / "run"
    words = ["train", str(config), "--data-dir", str(tiny_data), "--target", "dim", "--rounds", "1", "--out", str(out)]
    status, shown, progress = call(monkeypatch, capsys, *words)
    assert status == 0 and "dim" in shown and "round 1/1" in progress and "from scratch" in progress
    assert json.loads((out / "results.json").read_text())["rounds"] == 1
    status, _, errors = call(monkeypatch, capsys, *words)
    assert status == 2 and "finished run" in errors


@pytest.mark.parametrize(("what", "name"), [("methods", "fedavg"), ("datasets", "digits"), ("archs", "resnet18")])
def test_list_for_people_and_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str, name: str
) -> None:
    _, text, _ = call(monkeypatch, capsys, "list", what)
    _, output, _ = call(monkeypatch, capsys, "list", what, "--json")
    rows = {row["name"]: row for row in json.loads(output)}
    assert name in text and name in rows
    if what == "methods":
        assert {"setting", "paper", "needs"} <= set(rows[name])
    if what == "datasets":
        assert rows["digits"]["builtin"] is True and len(rows["digits"]["domains"]) >= 5
        assert len(rows["digits"]["classes"]) == 10 and rows["pacs"]["builtin"] is False


def test_check_data_counts_and_fails_when_a_run_could_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for site in ("north", "south"):
        for label in ("cat", "dog"):
            folder = tmp_path / site / label
            folder.mkdir(parents=True)
            for number in range(12):
                pixels = np.full((20, 20, 3), 10 * number + len(site + label), dtype=np.uint8)
                pixels[number] = 200 if label == "cat" else 90
                Image.fromarray(pixels).save(folder / f"{number}.png")
    status, shown, _ = call(monkeypatch, capsys, "check-data", str(tmp_path))
    assert status == 0 and "A run can start." in shown and "north" in shown and "dog" in shown
    for path in (tmp_path / "south" / "dog").iterdir():
        path.write_bytes(b"not an image")
    status, shown, _ = call(monkeypatch, capsys, "check-data", str(tmp_path))
    assert status == 2 and "A run cannot start." in shown and "south" in shown


def test_doctor_finds_this_installation_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown, _ = call(monkeypatch, capsys, "doctor")
    assert status == 0 and "torch arithmetic" in shown and "FAIL" not in shown


def test_privacy_is_read_from_the_types(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = call(monkeypatch, capsys, "privacy", "FedAvg")
    assert status == 0
    for word in ("averaging.train", "model", "weights", "samples", "count", "only the sum"):
        assert word in shown
    assert "other sites" not in shown
    # FedDG lends pieces of spectra to the other sites: that must be said.
    assert "coordinator, other sites" in call(monkeypatch, capsys, "privacy", "feddg")[1]


def test_a_part_of_the_name_is_enough_to_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, output, _ = call(monkeypatch, capsys, "list", "suites", "kd3a", "--json")
    names = [row["name"] for row in json.loads(output)]
    assert "kd3a/table7" in names and all(name.startswith("kd3a/") for name in names)
    code, _, said = call(monkeypatch, capsys, "list", "methods", "kd4a")
    assert code == 2 and "'kd4a'" in said


@pytest.mark.parametrize("method", list(METHODS))
def test_privacy_can_be_read_in_80_columns(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = call(monkeypatch, capsys, "privacy", method, columns=80)[1]
    unsent = find_about(method).unsent
    names = {name for step in find_method(method).steps for name in (step.name, *(set(kinds(step.release)) - unsent))}
    whole = set(shown.split())
    assert names | {"handshake.introduce", "evaluation.score", "coordinator"} <= whole and "…" not in shown


def test_predict_names_classes_and_reports_unreadable_files(
    trained: fedshift.Run,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = np.load(tiny_data / "amber.npz")["test_images"][:9]
    folder = tmp_path / "new"
    (folder / "deeper").mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / ("deeper" if number % 2 else ".") / f"{number}.png")
    (folder / "broken.png").write_bytes(b"nothing")
    out = tmp_path / "predictions.csv"
    status, shown, _ = call(monkeypatch, capsys, "predict", str(trained.path), str(folder), "--out", str(out))
    assert status == 0 and "9 predictions" in shown and "1 unreadable" in shown
    rows = {row["file"]: row for row in csv.DictReader(out.open())}
    assert rows["broken.png"]["note"].startswith("unreadable") and len(rows) == 10
    expected = trained.predict(images)
    names = trained.results["classes"]
    for number in range(9):
        row = rows[f"deeper/{number}.png" if number % 2 else f"{number}.png"]
        assert row["prediction"] == names[expected[number]]
        assert sum(float(row[f"p_{name}"]) for name in names) == pytest.approx(1, abs=1e-3)


def test_the_python_interface_predicts_and_scores(trained: fedshift.Run, tiny_data: Path) -> None:
    with np.load(tiny_data / "dim.npz") as file:
        images, labels = file["test_images"], file["test_labels"]
    shares = trained.predict_proba(images)
    assert shares.shape == (30, 3) and np.allclose(shares.sum(1), 1, atol=1e-5)
    assert trained.score(images, labels) == pytest.approx(trained.results["accuracy"]["last"])
    floats = images.transpose(0, 3, 1, 2).astype(np.float32) / 255
    assert (trained.predict(floats) == trained.predict(images)).all()
    assert "dim" in trained.table() and repr(trained).startswith("Run(")
    chosen = trained.score(images, labels, select="source-val")
    assert chosen == pytest.approx(trained.results["accuracy"]["source_val"])
    with pytest.raises(fedshift.errors.InputError, match="takes"):
        trained.predict(images[:, :8])


def test_a_report_of_a_real_run(
    trained: fedshift.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    status, _, _ = call(monkeypatch, capsys, "report", str(trained.path), "--out", str(out))
    page = out.read_text()
    assert status == 0 and "fedavg" in page and trained.results["model_sha256"][:12] in page and "<svg" in page


def test_a_trained_file_is_where_the_next_run_starts(trained: fedshift.Run, tiny_data: Path, tmp_path: Path) -> None:
    keys = {"data_dir": tiny_data, "target": "dim", "rounds": 1, "arch": "digits-copa", "workers": 0}
    again = fedshift.fit(
        "fedavg", weights=str(trained.path / "model.safetensors"), lr=1e-6, policy={"min_samples": 2}, **keys
    )
    with np.load(tiny_data / "amber.npz") as file:
        images = file["test_images"]
    # One round at a rate near zero leaves what was loaded almost as it was.
    assert np.abs(again.predict_proba(images) - trained.predict_proba(images)).mean() < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--method", "fedavgg", "--dataset", "digits"],
            "There is no method 'fedavgg'. Did you mean 'fedavg'?",
        ),
        (["train", "--dataset", "digit"], "There is no data set 'digit'. Did you mean 'digits'?"),
        (["train", "--dataset", "digits", "--arch", "resnet19"], "There is no architecture 'resnet19'."),
        (
            ["train", "--dataset", "digits", "--set", "round=3"],
            "unknown configuration key 'round'. Did you mean 'rounds'?",
        ),
        (["train", "--dataset", "digits", "--set", "rounds"], "--set rounds: write it as key=value"),
        (["train", "--data-dir", "nowhere"], "There is no folder nowhere."),
        (["train", "--dataset", "digits", "--target", "photoo"], "no domain 'photoo'. Did you mean 'photo'?"),
        (["train", "--dataset", "digits", "--sources", "chalk,typo"], "no domain 'typo'."),
        (["bench", "copa/table11"], "There is no suite 'copa/table11'."),
        (["predict", "nothing", "pictures"], "there is no run nothing"),
        (["train", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
    ],
)
def test_a_wrong_option_is_told_before_torch_is_imported(arguments: list[str], message: str) -> None:
    program = f"""
import sys
sys.argv = ["fedshift", *{arguments!r}]
from fedshift.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr
    assert done.stdout.split() == ["False"]
