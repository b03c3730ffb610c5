"""Every command and every piece of Python in the documentation is run on small data, or at least taken apart.

What trains is cut to one short round. What cannot run here (other machines, data or hours that a test does not have) is
parsed by the command line's own parser, and every method, network, data set, suite and key in it must exist.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from doc_blocks import ROOT, Block, Command, CommandError, blocks, check, commands, write_standins

import fedshift
from fedshift import cli
from fedshift.bench import starter
from fedshift.bench.papers import SUITES, robust
from fedshift.bench.run import Processes
from fedshift.data.formats.columns import read_rules
from fedshift.deploy.project import read_project
from fedshift.errors import FedshiftError
from fedshift.localserver import LocalServer
from fedshift.runs.config import make_config

CONSOLE = blocks("console")
PYTHON = sorted({block.page for block in blocks("python")})

ONE_ROUND: dict[str, Any] = {
    "rounds": 1,
    "local_epochs": 1,
    "train_per_site": 16,
    "batch_size": 8,
    "evaluate_every": 1,
    "workers": 0,
    "policy.min_samples": 2,
}
SHORT = {
    "csac": {"csac.acquisition_epochs": 1, "csac.calibration_epochs": 1},
    "dualadapt": {"dualadapt.pretrain_epochs": 1},
    "fed-oracle": {"fed-oracle.pretrain_epochs": 1},
    "fed-mcd": {"fed-mcd.repeats": 1},
    "cent-mcd": {"cent-mcd.repeats": 1},
}
"""Keys that cut a training down to a second."""

ELSEWHERE = ("site", "coordinator", "status", "stop")
"""Commands for real machines; tests/deploy runs them."""

MEASURED = "docs/results.md"
"""Its commands repeat measurements of many minutes each: they are taken apart, not run."""

NOT_OURS = ("git", "cd", "tensorboard", "mlflow")
"""Programs whose options are not checked."""


def runs_here(command: Command) -> bool:
    words = command.words
    needs_more = (
        command.is_fragment
        or not command.is_first
        or words[1] in ELSEWHERE
        or "nvflare" in words
        or "paper" in words  # --scale paper: hours, and data sets to fetch
        or "camvid" in words
        or "PLACEHOLDER" in words
    )
    return command.program == "fedshift" and not needs_more


def is_fast(block: Block) -> bool:
    """What readers type first is tested always; other blocks where nothing is trained or counted."""
    called = {command.words[1] for command in commands(block) if runs_here(command)}
    trains = bool(runs_needed(block)) or not called.isdisjoint({"train", "audit", "cost"})
    return "bench" not in called and (block.page in FIRST or not trains)


def runs_needed(block: Block) -> list[str]:
    """Run folders of the reader's that a block uses and does not make."""
    made = {word for command in commands(block) for word in command.words if command.words[1] == "train"}
    return [out for out in ("runs/first", "runs/second") if out in block.text and out not in made]


def slow_unless(fast: bool) -> Any:
    return () if fast else pytest.mark.slow


FIRST = ("README.md", "docs/first-steps.md")


def runnable() -> Iterator[Any]:
    """Blocks with something to run. A suite that stands alone in a block and ran for an earlier one is left out."""
    done: set[tuple[str, ...]] = set()
    for block in CONSOLE:
        if block.page == MEASURED:
            continue
        here = {tuple(command.arguments) for command in commands(block) if runs_here(command)}
        if not here or (here <= done and all(words[0] == "bench" for words in here)):
            continue
        done |= here
        yield pytest.param(block, id=str(block), marks=slow_unless(is_fast(block)))


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture(scope="session")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("standins")
    write_standins(root)
    return root


@pytest.fixture
def here(standins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run commands in, where data of the reader's own is."""
    for data in standins.iterdir():
        (tmp_path / data.name).symlink_to(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fedshift_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `fedshift WORDS` in this process and returns what it printed. A page that is served ends at once, as with
    Ctrl-C."""

    def stop_at_once(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalServer, "serve_forever", stop_at_once)
    monkeypatch.setattr(Processes, "train", train_in_this_process)

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fedshift", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        shown = capsys.readouterr()
        assert code == 0, f"fedshift {' '.join(words)}\n{shown.out}{shown.err}"
        return shown.out

    return call


def train_in_this_process(self: Processes, config: Path, folder: Path, log: Path, threads: int) -> int:
    """Starting a process takes longer than these trainings; tests/bench tests the processes."""
    return starter.train(config, folder)


def shortened(words: list[str]) -> list[str]:
    """The same command, with as little work as shows that it works."""
    if words[0] == "compare":
        keys = {key: value for key, value in ONE_ROUND.items() if key != "workers"} | SHORT["csac"]
        return [*words, "--jobs", "1", *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))]
    if words[0] == "train" and "fedshift.yaml" in words:  # What init wrote: the method is chosen.
        words = [*words, "--budget", "0.01"]
    if words[0] == "train":
        method = words[words.index("--method") + 1] if "--method" in words else "fedavg"
        keys = ONE_ROUND | SHORT.get(method, {})
        return words + [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    if words[0] == "bench" and "--records" not in words:
        known = [row.method for row in SUITES[words[1]].rows]
        rows = [] if "--methods" in words else ["--methods", "fedavg" if "fedavg" in known else known[0]]
        return [*words, *rows, "--seeds", "0", "--jobs", "1", "--set", "rounds=1", "--set", "train_per_site=16"]
    if words[:2] == ["audit", "leakage"]:
        return [*words, "--steps", "2", "--shadows", "0", "--sizes", "1", "--minutes", "0.05"]
    return words


def write_named_files(page: str, folder: Path) -> None:
    """Files that the page shows, where the first line is a comment with their name."""
    for block in blocks("yaml"):
        named = re.match(r"# (\S+\.yaml)\n", block.text)
        if block.page == page and named:
            (folder / named[1]).write_text(block.text)


def globbed(words: list[str], folder: Path) -> list[str]:
    """Words with a star as a shell gives them to a command."""
    return [name for word in words for name in (sorted(map(str, folder.glob(word))) if "*" in word else [word])]


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_every_command_exists_with_its_options_and_names(block: Block) -> None:
    found = commands(block)
    assert found
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in found:
        if command.program == "fedshift":
            check(command)
        elif command.program == "make":
            assert set(command.arguments) <= set(targets)
        elif command.program == "pip":
            named = re.findall(r"\[([\w,]+)\]", " ".join(command.arguments))
            assert set(",".join(named).split(",")) - {""} <= set(extras)
            assert "constraints.txt" not in command.arguments or (ROOT / "constraints.txt").exists()
        elif command.program.startswith("python"):
            is_module = command.words[1] == "-m"
            assert find_spec(command.words[2]) if is_module else (ROOT / command.words[1]).exists()
        elif command.program in ("pre-commit", "pytest"):
            assert all((ROOT / word).exists() for word in command.arguments if "/" in word)
        else:
            assert command.program in NOT_OURS, f"{block}: a program that no test knows: {command.program}"


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        ("fedshift trian --dataset digits", "trian"),
        ("fedshift train --datset digits", "--datset"),
        ("fedshift train --method fedavgg --dataset digits", "fedavgg"),
        ("fedshift train --dataset digit", "digit"),
        ("fedshift train --dataset digits --arch vgg", "vgg"),
        ("fedshift train --dataset digits --set round=3", "round"),
        ("fedshift train --dataset digits --method copa --set copa.normm=bn", "normm"),
        ("fedshift train ... --set freeze=true", "freeze"),
        ("fedshift bench copa/table99", "copa/table"),
        ("fedshift bench copa/table1 --set round=3", "round"),
        ("fedshift audit leakage --dataset digits --step 3", "--step"),
        ("for m in fedavg copaa; do fedshift train --method $m --dataset digits; done", "copaa"),
    ],
)
def test_what_is_wrong_in_a_command_is_found(typed: str, wrong: str) -> None:
    with pytest.raises((FedshiftError, CommandError, AssertionError)) as raised:
        for command in commands(Block("page.md", 1, "console", f"$ {typed}\n")):
            check(command)
    told = raised.value.format_message() if isinstance(raised.value, CommandError) else str(raised.value)
    assert wrong in told


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_files_that_are_shown_can_be_read(block: Block, tmp_path: Path) -> None:
    values = yaml.safe_load(block.text)
    if "method" in values:
        assert make_config(values).method == values["method"]
    elif "address" in values:
        file = tmp_path / "project.yaml"
        file.write_text(block.text)
        assert list(read_project(file).sites) == values["sites"]
    elif "services" in values:
        for service in values["services"].values():
            check(Command(tuple(shlex.split(service["command"]))))
    elif "categories" in values:
        (tmp_path / "columns.yaml").write_text(block.text)
        assert list(read_rules(tmp_path).categories) == list(values["categories"])
    else:
        assert make_config({"policy": values}).policy == values


def test_commands_stand_in_console_blocks() -> None:
    """So that none is overlooked: a block without a language shows no command, one for a console begins with one."""
    hidden = [str(block) for block in blocks("") + blocks("text") + blocks("bash") if "fedshift " in block.text]
    assert [name for name in hidden if not name.startswith(("docs/real-machines.md", "docs/architecture.md"))] == []
    assert [str(block) for block in CONSOLE if not block.text.startswith("$ ")] == []


@pytest.mark.parametrize("block", list(runnable()))
def test_commands_run(
    block: Block, here: Path, fedshift_command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of a block, one after the other in one folder. Each prints something and ends well."""
    for attacks in (robust.ATTACKS, robust.FORGERIES):  # Hundreds of trainings otherwise; tests/bench runs them all.
        for attack in reversed(list(attacks)[1:]):  # Undone from the last to the first: in the old order.
            monkeypatch.delitem(attacks, attack)
    write_named_files(block.page, here)
    for out in runs_needed(block):
        fedshift_command(*shortened(["train", "--data-dir", "scans", "--target", "west", "--out", out]))
    (here / "runs").mkdir(exist_ok=True)
    asked = [command.arguments for command in commands(block)]
    if any("fedshift.yaml" in words for words in asked) and not any("init" in words for words in asked):
        fedshift_command("init", "scans")
    for command in filter(runs_here, commands(block)):
        assert fedshift_command(*shortened(globbed(command.arguments, here)))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=slow_unless(page == "README.md"), id=page) for page in PYTHON]
)
def test_python_runs(page: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of a page, from top to bottom in one namespace. After each training, `images` and `labels` are there
    to predict on."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    fit, benchmark = fedshift.fit, fedshift.benchmark

    def short_fit(method: Any = "fedavg", **keys: Any) -> fedshift.Run:
        plain = {key: value for key, value in ONE_ROUND.items() if "." not in key}
        own_keys = SHORT.get(method, {}) if isinstance(method, str) else {}
        short = {key.partition(".")[2]: value for key, value in own_keys.items()}
        own = {method: {**keys.get(method, {}), **short}} if short else {}
        run = fit(method, **{**keys, **plain, **own, "policy": {"min_samples": 2}})
        shape = run.model().header.input_shape
        names["images"] = np.zeros((3, *shape[1:], shape[0]), np.uint8)
        names["labels"] = np.zeros((3, *shape[1:]) if run.results["task"] == "segmentation" else 3, np.int64)
        return run

    def short_benchmark(suite: str, **keys: Any) -> Any:
        settings = {**dict(keys.pop("settings", {})), "rounds": 1, "train_per_site": 16}
        return benchmark(suite, **{"methods": ["copa"], **keys, "seeds": [0], "jobs": 1, "settings": settings})

    assert inspect.signature(fit).parameters.keys() >= {"method", "out"}
    monkeypatch.setattr(Processes, "train", train_in_this_process)
    monkeypatch.setattr(fedshift, "fit", short_fit, raising=False)
    monkeypatch.setattr(fedshift, "benchmark", short_benchmark, raising=False)
    for block in blocks("python"):
        if block.page == page:
            exec(compile(block.text, str(block), "exec", dont_inherit=True), names)
