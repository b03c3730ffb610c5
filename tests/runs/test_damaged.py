"""Every file of a run, damaged in every way: an error names it, or what comes out is what came out before."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.errors import FedshiftError, InputError
from fedshift.federation import codec
from fedshift.federation.store import SiteStore
from fedshift.methods.base import SHARED
from fedshift.report import write_report
from fedshift.report.live import Watcher
from fedshift.runs.config import make_config, read_config
from fedshift.runs.directory import RunDirectory
from fedshift.runs.execute import run
from fedshift.runs.files.model import load_model, save_model
from fedshift.runs.predict import predict_files
from fedshift.runs.progress import Silent

TABLES = Path(__file__).parent.parent / "fixtures" / "v0.1.0" / "tables"
NEW = TABLES.parent / "new.csv"

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


class Heard(Silent):
    def __init__(self, stop_after: int = 0) -> None:
        self.messages: list[str] = []
        self.stop_after = stop_after

    def message(self, text: str) -> None:
        self.messages.append(text)

    def round(self, round: int, val: Any, test: Any) -> None:
        if round == self.stop_after:
            raise KeyboardInterrupt


def settings() -> Any:
    """CSAC: its sites store two things between rounds."""
    return make_config(
        {
            **{"method": "csac", "data_dir": TABLES, "label_column": "outcome", "target": "west", "rounds": 3},
            **{"batch_size": 16, "workers": 0, "csac": {"acquisition_epochs": 1, "calibration_epochs": 1}},
        }
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(settings(), folder)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped before its third checkpoint was written."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(settings(), folder, progress=Heard(stop_after=3))
    return folder


def emptied(data: bytes, draw: random.Random) -> bytes:
    return b""


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))] if data else b"x"


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(3):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def rubbish(data: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(300)


def aliases(data: bytes, draw: random.Random) -> bytes:
    return ALIASES.encode()


def huge_number(data: bytes, draw: random.Random) -> bytes:
    changed = re.sub(rb"(?<=: )\d+", b"9" * 400, data, count=5)
    return changed if changed != data else data + b": " + b"9" * 400


def nested(data: bytes, draw: random.Random) -> bytes:
    return b"[" * 100_000


WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    emptied,
    cut,
    flipped,
    rubbish,
    aliases,
    huge_number,
    nested,
)


def files_of(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != ".lock")


def damaged_copies(
    names: list[str], folder: Path, place: Path, in_every_way: Callable[[str], bool]
) -> Iterator[tuple[str, str, Path]]:
    """(file, way, copy of the run) for each file and two ways to damage it, or all of them; folders in place of files
    too."""
    draw = random.Random(17)
    for name in names:
        for way in [*(WAYS if in_every_way(name) else (cut, flipped)), None]:
            copy = place / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            file = copy / name
            if way is None:
                file.unlink()
                file.mkdir()
            else:
                file.write_bytes(way(file.read_bytes(), draw))
            yield name, way.__name__ if way else "a folder", copy


def tell(problems: list[str], what: str, name: str, work: Callable[[], Any], expected: Any) -> str:
    """What came of it in a word. Anything but the expected answer or an error with the name is a problem."""
    try:
        got = work()
    except FedshiftError as error:
        if Path(name).name not in error.message:
            problems.append(f"{what}: the error does not name it: {error.message}")
        return "error"
    except Exception as error:
        problems.append(f"{what}: {type(error).__name__}: {error}")
        return "crash"
    if expected is not None and got != expected:
        problems.append(f"{what}: another answer")
    return "same"


many = pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.slow)])


@many
@pytest.mark.timeout(300)
def test_a_finished_run(whole: Path, tmp_path: Path, every_way: bool) -> None:
    """`predict` answers with the same bytes or names the file, `report` draws the same page or names it, `--resume`
    finds what it left, and the list of runs shows the run, or says what is wrong."""
    out, page = tmp_path / "out.csv", tmp_path / "page.html"

    def predict(folder: Path) -> bytes:
        predict_files(folder, NEW, out)
        return out.read_bytes()

    def report(folder: Path) -> str:
        write_report([folder], page, features=False)
        return re.sub(r"<time.*</time>", "", page.read_text())

    shutil.copytree(whole, tmp_path / "copy")
    predicted, reported = predict(tmp_path / "copy"), report(tmp_path / "copy")
    results = run(settings(), tmp_path / "copy", resume=True)
    problems: list[str] = []
    outcomes: dict[str, list[str]] = {}
    # Nobody reads the checkpoints of a finished run, nor what its sites stored.
    names = [name for name in files_of(whole) if "/" not in name or "north/ledger" in name]
    for name, way, folder in damaged_copies(names, whole, tmp_path, lambda name: every_way):
        found = [
            tell(problems, f"predict, {name} {way}", name, partial(predict, folder), predicted),
            tell(problems, f"report, {name} {way}", name, partial(report, folder), reported),
            tell(problems, f"resume, {name} {way}", name, partial(run, settings(), folder, resume=True), results),
        ]
        outcomes.setdefault(name, []).extend(found)
        (watched,) = Watcher(folder).runs()
        if watched.problem and Path(name).name not in watched.problem:
            problems.append(f"ui, {name} {way}: {watched.problem}")
    print({name: {word: found.count(word) for word in set(found)} for name, found in outcomes.items()})
    assert problems == []
    for name in ("model.safetensors", "results.json", "config.yaml", "metrics.jsonl", "env.json"):
        assert "error" in outcomes[name], f"nobody noticed that {name} was damaged"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_run(whole: Path, stopped: Path, tmp_path: Path) -> None:
    """It ends in the same model, or an error names the file. What tells of a site only (its ledger) is its own. The
    files of one site are damaged in every way, those of the others, which are of the same kinds, in some."""
    expected = RunDirectory(whole).digests["model.safetensors"]
    problems: list[str] = []
    outcomes: dict[str, list[str]] = {}

    def in_every_way(name: str) -> bool:
        return "north" in name or "sites" not in name

    for name, way, folder in damaged_copies(files_of(stopped), stopped, tmp_path, in_every_way):
        heard = Heard()
        report = partial(write_report, [folder], tmp_path / "p.html")
        tell(problems, f"report, {name} {way}", name, report, None)
        if "ledger" in name:
            continue
        (watched,) = Watcher(folder).runs()
        if watched.problem and Path(name).name not in watched.problem:
            problems.append(f"ui, {name} {way}: {watched.problem}")

        def resume(folder: Path = folder, heard: Heard = heard) -> str:
            return str(run(settings(), folder, resume=True, progress=heard)["model_sha256"])

        word = tell(problems, f"resume, {name} {way}", name, resume, expected)
        said = any(Path(name).name in message for message in heard.messages)
        outcomes.setdefault(name, []).append("said" if said else word)
    print({name: {word: found.count(word) for word in set(found)} for name, found in outcomes.items()})
    problems = [problem for problem in problems if "another configuration" not in problem]
    assert problems == []
    used = [name for name in outcomes if "local@1" in name or "projections@2" in name or "round-00002" in name]
    assert len(used) == 7, "three sites store two things each"
    for name in used:
        assert set(outcomes[name]) <= {"said", "error"}, f"{name} was damaged, and nothing was said"


def test_a_site_state_that_is_gone_is_not_begun_anew(stopped: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "sites" / "east" / "state" / "projections@2.safetensors").unlink()
    heard = Heard()
    results = run(settings(), tmp_path / "run", resume=True, progress=heard)
    assert any("projections@2.safetensors" in message for message in heard.messages)
    assert results["model_sha256"] == RunDirectory(whole).digests["model.safetensors"]
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "sites" / "east" / "state")
    with pytest.raises(InputError, match=r"no checkpoint .* can be used.*east/state/local@1\.safetensors") as caught:
        run(settings(), tmp_path / "run", resume=True)
    assert caught.value.code == "run-corrupt"


def test_a_stored_file_under_another_name_or_round_is_refused(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    store.save("local", {"w": torch.ones(3)}, 1)
    (tmp_path / "local@1.safetensors").replace(tmp_path / "local@2.safetensors")
    with pytest.raises(FedshiftError, match=r"local@2\.safetensors is damaged") as caught:
        store.load("local")
    assert caught.value.code == "run-corrupt"
    with pytest.raises(FedshiftError, match=r"local@2\.safetensors is damaged"):
        store.rewind(2)
    store.rewind(1)
    assert store.load("local") is None


def test_state_without_a_checksum_is_still_read(tmp_path: Path) -> None:
    """As 0.2.0 and before stored it."""
    (tmp_path / "local@1.safetensors").write_bytes(codec.pack({"w": torch.ones(3)}))
    assert SiteStore(tmp_path).load("local")["w"].tolist() == [1, 1, 1]


def test_weights_that_are_no_numbers_are_neither_saved_nor_loaded(whole: Path, tmp_path: Path) -> None:
    saved = load_model(whole / "model.safetensors")
    next(value for value in saved.models[SHARED].values() if value.is_floating_point()).view(-1)[0] = torch.nan
    with pytest.raises(InputError, match="training diverged") as caught:
        save_model(tmp_path / "model.safetensors", saved)
    assert caught.value.code == "model-diverged" and list(tmp_path.iterdir()) == []
    tensors, metadata = codec.read_safetensors((whole / "model.safetensors").read_bytes())
    next(value for value in tensors.values() if value.is_floating_point()).view(-1)[0] = torch.inf
    header = {key: value for key, value in codec.read_header(metadata).items() if key != "sha256"}
    (tmp_path / "model.safetensors").write_bytes(codec.seal(tensors, header))
    with pytest.raises(InputError, match=r"model\.safetensors: .* no finite numbers"):
        load_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classes": ["a", "b\x1b[2J", "c"]}, "no printable text"),
        ({"classes": ["a", "b", "\ud800"]}, "no printable text"),
        ({"sites": ["\x1b[31m"]}, "no printable text"),
        ({"input_shape": []}, "neither rows nor pictures"),
        ({"input_shape": [3, 10**9, 10**9], "columns": [], "mean": [], "std": []}, "more than 8192 pixels"),
        ({"input_shape": [9], "mean": [], "std": []}, "another number of columns"),
        ({"mask_ids": [1, 300, 2]}, "from 0 to 255"),
        ({"classes": [str(number) for number in range(10**5)]}, "not those of the network"),
        ({"arch": "resnet101"}, "takes images"),
        ({"method": "fedsr", "hyper": {"z": 10**12}, "plain": False}, "cannot be built|not those of the network"),
        ({"columns": []}, "knows no names of columns"),
    ],
    ids=str,
)
def test_a_model_that_declares_what_it_is_not_is_one_error(
    change: dict[str, Any], says: str, whole: Path, tmp_path: Path
) -> None:
    """Its checksums are right: whoever made it, made them too."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    tensors, metadata = codec.read_safetensors((whole / "model.safetensors").read_bytes())
    header = {key: value for key, value in codec.read_header(metadata).items() if key != "sha256"}
    data = codec.seal(tensors, header | change)
    (folder / "model.safetensors").write_bytes(data)
    results = json.loads((folder / "results.json").read_text()) | {"model_sha256": codec.sha256(data)}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "done").write_text("")
    with pytest.raises(InputError, match=says):
        predict_files(folder, NEW, tmp_path / "out.csv")


def test_a_file_that_declares_more_than_it_has_takes_no_memory(tmp_path: Path) -> None:
    """A sparse file of a terabyte: reading it would be the end of this process."""
    file = tmp_path / "model.safetensors"
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    os.truncate(file, 2**40)
    with pytest.raises(InputError, match=r"model\.safetensors.*its size is not the one"):
        load_model(file)
    config = tmp_path / "config.yaml"
    config.write_bytes(b"")
    os.truncate(config, 2**40)
    with pytest.raises(InputError, match=r"config\.yaml is larger than 1 MB"):
        read_config(config)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ALIASES, "anchors and aliases"),
        ("a: *b", "anchors and aliases"),
        ("lr: 0.1\nlr: 0.2", "'lr' is there twice"),
        ("[" * 1000, "more than 50 levels"),
        ("a: 2026-13-45", "cannot be read"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
    ],
)
def test_configurations_are_plain(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=rf"c\.yaml is not valid YAML: .*{says}"):
        read_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("rule", ["7", "[median]", "nobody"])
def test_a_recorded_rule_that_is_none_is_an_error(whole: Path, tmp_path: Path, rule: str) -> None:
    """`--resume` takes the rule for averaging from the run's own configuration, if none is asked for."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "done").write_text("")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub("aggregation: .*", f"aggregation: {rule}", config.read_text()))
    with pytest.raises(InputError, match=r"aggregation"):
        run(settings(), tmp_path / "run", resume=True)


def test_half_a_character_in_a_log_ends_no_report(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "done").write_text("")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 1, "phase": "val", "site": "\ud800", "name": "accuracy", "value": 0.5}) + "\n")
    write_report([tmp_path / "run"], tmp_path / "page.html", features=False)
    assert "</html>" in (tmp_path / "page.html").read_text()
