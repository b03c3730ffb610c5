"""Commands and Python in the documentation: found, taken apart, checked without running, and data to run them on."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import typer
from PIL import Image

from fedshift.bench.papers import SUITES
from fedshift.cli.app import app
from fedshift.data import list_datasets
from fedshift.data.attacks import parse_attack
from fedshift.errors import nearest
from fedshift.methods import METHODS, find_about
from fedshift.nn import find_arch
from fedshift.registry import allow_import
from fedshift.runs.config import RunConfig, apply_settings, make_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELLIPSIS = "..."
# Typer may bring its own copy of click.
CommandError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line it starts at, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a block, with variables replaced. `is_first` is false for further values of a loop's variable."""

    words: tuple[str, ...]
    is_first: bool = True

    @property
    def program(self) -> str:
        return Path(self.words[0]).name

    @property
    def arguments(self) -> list[str]:
        return [word for word in self.words[1:] if word != ELLIPSIS]

    @property
    def is_fragment(self) -> bool:
        """Whether something was left out that stands elsewhere on the page."""
        return ELLIPSIS in self.words


@cache
def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[1] == language:
                line = text[: match.start()].count("\n") + 1
                found.append(Block(page.relative_to(ROOT).as_posix(), line, language, match[2]))
    return found


def statements(text: str) -> Iterator[str]:
    """What is typed after each `$`, over several lines where a line, a quotation or a loop continues. All other lines
    show what a command prints."""
    typed = ""
    for line in text.splitlines():
        is_open = bool(typed) and (
            typed.endswith("\\")
            or typed.count('"') % 2 == 1
            or len(re.findall(r"\bdo\b", typed)) > len(re.findall(r"\bdone\b", typed))
        )
        if is_open:
            typed = typed.removesuffix("\\") + ("\n" if typed.count('"') % 2 == 0 and typed[-1] != "\\" else " ") + line
        elif line.startswith("$ "):
            if typed:
                yield typed
            typed = re.sub(r"\s#\s.*$", "", line[2:])
    if typed:
        yield typed


def commands(block: Block) -> list[Command]:
    """The commands of a console block. Loops are unrolled over all values; placeholders in angle brackets are words."""
    found: list[Command] = []
    values: dict[str, list[str]] = {}
    for typed in statements(block.text):
        text = re.sub(r"<[^<>]*>", "PLACEHOLDER", typed)
        text = re.sub(r"\n(?=(?:[^\"]*\"[^\"]*\")*[^\"]*$)", " ; ", text)
        reader = shlex.shlex(text, posix=True, punctuation_chars=";&")
        reader.whitespace_split = True
        for is_end, group in itertools.groupby(reader, lambda word: word in (";", "&&", ";;")):
            words = list(group)
            while words and words[0] in ("do", "done"):
                words.pop(0)
            if is_end or not words:
                continue
            if words[0] == "for":
                values[words[1]] = words[3:]
            elif re.match(r"\w+=", words[0]):
                name, _, value = words[0].partition("=")
                values[name] = [value]
            else:
                found += unrolled(words, values)
    return found


def unrolled(words: list[str], values: dict[str, list[str]]) -> Iterator[Command]:
    used = list(values)
    for number, chosen in enumerate(itertools.product(*(values[name] for name in used))):
        line = " ".join(shlex.quote(word) if "$" not in word else word for word in words)
        for _ in used:  # a variable may hold others
            for name, value in zip(used, chosen, strict=True):
                line = re.sub(rf"\${name}\b", value, line)
        command = Command(tuple(shlex.split(line)), number == 0)
        if number == 0 or "$" in " ".join(words):
            yield command


def check(command: Command) -> None:
    """Parses a command of fedshift as it would be when typed, without running it, and checks every name in it."""
    context = parse(command.arguments, command.is_fragment)
    given = {key: value for key, value in context.params.items() if value not in (None, (), [], False)}
    kind = context.command_path.removeprefix("fedshift ")
    for path in (given.get("method", ""), given.get("arch", "")):
        if ":" in path:
            allow_import(path.partition(":")[0])
    if method := given.get("method"):
        find_about(method)
    if arch := given.get("arch"):
        find_arch(arch)
    if dataset := given.get("dataset"):
        known = [info.name for info in list_datasets()]
        assert dataset in known, f"no data set {dataset!r}. {nearest(dataset, known)}"
    for attack in given.get("attack", ()):
        parse_attack(attack)
    if kind == "train":
        check_run(given)
    elif kind == "bench":
        assert given["suite"] in SUITES, nearest(given["suite"], SUITES)
        check_settings(given.get("set_", ()))
    elif kind == "audit leakage":
        check_settings(given.get("set_", ()))


def check_run(given: dict[str, Any]) -> None:
    """Makes the whole configuration: every key exists and every value has its type and range."""
    flags = {key: value for key, value in given.items() if key in RunConfig.model_fields}
    for key in ("sources", "targets"):
        if key in flags:
            flags[key] = tuple(flags[key].split(","))
    make_config(apply_settings(flags, given.get("set_", ())))


def check_settings(settings: Any) -> None:
    for key in apply_settings({}, settings):
        assert key in RunConfig.model_fields or key in METHODS, key


def parse(arguments: list[str], is_fragment: bool) -> Any:
    command: Any = typer.main.get_command(app)
    context = command.make_context("fedshift", list(arguments), allow_extra_args=True, allow_interspersed_args=False)
    rest = [*context._protected_args, *context.args]
    while hasattr(command, "resolve_command"):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, f"fedshift has no command {name!r}"
        is_group = hasattr(found, "resolve_command")
        context = found.make_context(
            name, list(rest), parent=context, resilient_parsing=is_fragment, allow_interspersed_args=not is_group
        )
        command = found
    return context


def pictures(folder: Path, count: int, side: int, tint: tuple[float, float, float], stripes: bool, seed: int) -> None:
    """PNGs of noise in a colour, with stripes for one of two classes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = (np.arange(side) // 4 % 2)[:, None, None] if stripes else 0.5
    for number in range(count):
        values = 255 * np.array(tint) * (0.3 + 0.5 * rows) + rng.normal(0, 20, (side, side, 3))
        Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")


def large_pictures(folder: Path, count: int, side: int, seed: int) -> None:
    """PNGs of a dark line on noise, with masks."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        mask = np.zeros((side, side), np.uint8)
        mask[:, int(rng.integers(side - 3)) :][:, :3] = 1
        values = rng.normal(180, 20, (side, side, 3)) - 90 * mask[..., None]
        Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")


def write_standins(root: Path) -> None:
    """Small data under the names that the documentation uses for data of the reader's own."""
    tints = {"north": (1.0, 0.8, 0.6), "south": (0.5, 0.7, 1.0), "west": (0.8, 1.0, 0.7)}
    for number, (site, tint) in enumerate(tints.items()):
        for stripes, name in enumerate(("benign", "malignant")):
            pictures(root / "scans" / site / name, 24, 48, tint, bool(stripes), 10 * number + stripes)
        large_pictures(root / "eyes" / site, 12, 240, number)
    pictures(root / "new-pictures", 24, 60, (0.9, 0.9, 0.9), True, 99)
    for number, domain in enumerate(("mnist", "mnist_m", "svhn", "usps")):
        rng = np.random.default_rng(number)
        parts = {}
        for split, count in (("train", 60), ("test", 20)):
            parts[f"{split}_images"] = rng.integers(0, 255, (count, 20, 20, 3), dtype=np.uint8)
            parts[f"{split}_labels"] = np.arange(count) % 10
        (root / "DIGITS").mkdir(exist_ok=True)
        np.savez(root / "DIGITS" / f"{domain}.npz", **parts)
    for number, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        for stripes, name in enumerate(("dog", "house")):
            shade = 0.4 + 0.2 * number
            pictures(root / "PACS" / domain / name, 16, 40, (shade, 0.8, 1 - shade / 2), bool(stripes), 7 * number)
    (root / "DIR").symlink_to(root / "scans")
    for name in ("results", "examples"):
        (root / name).symlink_to(ROOT / name)
