"""Corrupted replies against the coordinator's gate: none may raise an error, and none that lies may be admitted.

Every method runs for a round or two on tiny data. What its sites answered is then corrupted in every way that is listed
here and shown to the gate again, with what the coordinator knew when it asked. What the gate lets through is compared
with the honest answer by other code than the gate's. Large messages are admitted in a process of their own, whose
memory is measured.

Run: python benchmarks/fuzz.py [corruptions]
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import zstandard

from fedshift.data.memory import dataset_from
from fedshift.errors import CATALOGUE
from fedshift.federation import codec, federation, survey
from fedshift.federation.admission import UNKNOWN_CODE, Failed, admit, fields_of, inspect
from fedshift.federation.checks import Refused
from fedshift.federation.compression import Update
from fedshift.federation.handshake import introduce
from fedshift.federation.releases import Count, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Request, Step
from fedshift.methods import METHODS
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

CORRUPTIONS = 100_000
SIDE, CLASSES, SITES = 16, 3, ("a", "b", "c", "d")
MEMORY_BOUND, ALWAYS_ALLOWED = 3.0, 64 * 2**20
"""The gate may take this many times the bytes of a message, and so many bytes for any: parsed, a text that says what a
site has takes more than it has bytes, but it may have few."""
KEYS: Mapping[str, Mapping[str, Any]] = {
    "csac": {"acquisition_epochs": 1, "calibration_epochs": 1},
    "dualadapt": {"pretrain_epochs": 1},
    "fed-oracle": {"pretrain_epochs": 1},
    "fed-mcd": {"repeats": 1},
    "cent-mcd": {"repeats": 1},
}


# --- Honest answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """An honest answer, and all that the gate is told about it."""

    name: str
    data: bytes
    request: Request
    step: Step[Any]
    expected: Mapping[str, Any]
    max_norm: float
    sizes: Mapping[str, int]
    waited: float

    @cached_property
    def tree(self) -> Any:
        return codec.unpack(self.data)

    @cached_property
    def release(self) -> Any:
        fields = dict(self.tree["release"])
        for name, expected in self.expected.items():
            if isinstance(expected, Update):
                fields[name] = expected.decoded(fields[name])
        return codec.restore(self.step.release, fields)

    def shown(self, data: bytes) -> Any:
        """What the gate makes of `data` in place of the answer, without the net under it."""
        return inspect(data, self.request, self.step, self.expected, self.max_norm, self.sizes, self.waited)


def honest_answers(methods: Iterable[str]) -> list[Asked]:
    """One answer to every step of the methods, to the handshake, to scoring (also of masks), to questions for models in
    fewer bytes, and to the survey."""
    found: dict[tuple[str, str], Asked] = {}
    cases = [(name, False, "none") for name in methods] + [("fedavg", True, "none")]
    cases += [("fedavg", False, compress) for compress in ("bf16", "int8", "int4", "topk")]
    with tempfile.TemporaryDirectory() as folder:
        for number, (method, is_masks, compress) in enumerate(cases):
            name = method + " on masks" * is_masks + f" in {compress}" * (compress != "none")
            with _recorded() as answers:
                _train(method, is_masks, Path(folder) / str(number), compress)
            for asked in answers:
                found.setdefault((name, asked.step.name), dataclasses.replace(asked, name=name))
    return [*found.values(), _survey()]


@contextmanager
def _recorded() -> Iterator[list[Asked]]:
    answers: list[Asked] = []

    def record(data: bytes, request: Request, step: Any, expected: Any, limit: float, sizes: Any, waited: float) -> Any:
        answers.append(Asked("", data, request, step, expected, limit, sizes or {}, waited))
        return admit(data, request, step, expected, limit, sizes, waited)

    federation.admit = record  # type: ignore[assignment]
    try:
        yield answers
    finally:
        federation.admit = admit


def _train(method: str, is_masks: bool, folder: Path, compress: str) -> None:
    rng = np.random.default_rng(0)
    labels = (SIDE, SIDE) if is_masks else ()
    data = {
        site: {
            split: (
                rng.integers(0, 255, (count, SIDE, SIDE, 3), dtype=np.uint8),
                rng.integers(0, CLASSES, (count, *labels)).astype(np.uint8 if is_masks else np.int64),
            )
            for split, count in (("train", 24), ("val", 9), ("test", 12))
        }
        for site in SITES
    }
    setting = METHODS[method].about.settings[0]
    roles = {"home": "a"} if setting == "multi-adapt" else {"target": "d"}
    keys = {method: dict(KEYS[method])} if method in KEYS else {}
    config = make_config(
        {
            "method": method,
            "setting": setting,
            "dataset": "memory",
            "arch": "segnet-small" if is_masks else "digits-copa",
            "rounds": 2 if method == "csac" else 1,
            "local_epochs": 0.5,
            "batch_size": 8,
            "workers": 0,
            "policy": {"min_samples": 2},
            "compress": compress,
            **roles,
            **keys,
        }
    )
    run(config, folder, dataset=dataset_from(data, classes=[str(number) for number in range(CLASSES)]))


def _survey() -> Asked:
    facts = survey.Found("0", "classification", ("cat", "dog"), (3, SIDE, SIDE), (), time.time())
    request = Request("a", "survey.look", 0, "n", codec.pack({}))
    envelope = request.head | {"code": None, "release": {"facts": facts}, "clipped": 0, "seconds": "00000000.001"}
    return Asked("survey", codec.pack(envelope), request, survey.SURVEY, {}, 0.0, {}, 1.0)


# --- Corruptions --------------------------------------------------------------------------------------------------

Tree = dict[str, Any]
Place = tuple[Any, Any]
"""A container and the key of a value in it."""


def forged(tree: Any) -> bytes:
    """Packs what `codec.pack` would refuse to: NaN outside of tensors, and tensors of any type."""
    tensors: dict[str, torch.Tensor] = {}

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = str(len(tensors))
            tensors[name] = value.contiguous().clone()
            return {"~tensor": name}
        if isinstance(value, dict):
            return {key: lift(item) for key, item in value.items()}
        return [lift(item) for item in value] if isinstance(value, list) else value

    return bytes(safetensors.torch.save(tensors, metadata={"fedshift": json.dumps(lift(tree))}))


def _places(tree: Any) -> Iterator[Place]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _tensors(tree: Tree, is_float: bool | None = None) -> list[Place]:
    return [
        (parent, key)
        for parent, key in _places(tree["release"])
        if isinstance(parent[key], torch.Tensor) and is_float in (None, parent[key].is_floating_point())
    ]


def bits_flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    # Half of them in the header: most of a message is numbers, of which another is as good.
    (header,) = struct.unpack("<Q", data[:8])
    end = len(data) if rng.random() < 0.5 else min(len(data), 8 + header)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    start = rng.choice((0, 0, 0, rng.randrange(len(data))))
    return data[start : start + rng.randrange(len(data))]


def spliced(data: bytes, rng: random.Random) -> bytes:
    at, noise = rng.randrange(len(data)), rng.randbytes(rng.randrange(1, 200))
    return data[:at] + noise + data[at + rng.choice((0, len(noise))) :]


def another_header_length(data: bytes, rng: random.Random) -> bytes:
    return struct.pack("<Q", rng.choice((0, 1, 2, len(data), 2**32, 2**63, 2**64 - 1, rng.randrange(2**20)))) + data[8:]


def _nested(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = [tree]
    return tree


ODD_VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        "",
        "text",
        "\x1b[31mred",
        "a\nb",
        "\u202etxt",
        "x" * 100_000,
        [],
        {},
        [[]],
        {"a": {}},
    ),
    *(0, -1, 1, 2**31, 2**63, 10**12, 10**13, 10**400, -(10**400), 1.5, -0.5, 1e308, -1e308),
    *(math.nan, math.inf, -math.inf, "nan", "inf", "-1.000", "1e400", "9" * 400, "00000001.000"),
    *(torch.tensor(1), torch.tensor(math.nan), torch.zeros(2, 0), torch.zeros(3, 3)),
    torch.zeros(2).to(torch.float8_e4m3fn),
    torch.zeros(2, dtype=torch.complex64),
    [list(range(5))] * 4,
    *(_nested(20), _nested(40), _nested(100)),
]


def type_swapped(tree: Tree, rng: random.Random) -> None:
    parent, key = rng.choice(list(_places(tree)))
    parent[key] = _shallow(rng.choice(ODD_VALUES))


def field_missing(tree: Tree, rng: random.Random) -> None:
    parent, key = rng.choice([place for place in _places(tree) if isinstance(place[0], dict)])
    del parent[key]


def field_extra(tree: Tree, rng: random.Random) -> None:
    parents = [tree, *(p[k] for p, k in _places(tree) if isinstance(p[k], dict))]
    rng.choice(parents)[rng.choice(("images", "", "\x1b[2J", "running_var", "~tensor"))] = _shallow(
        rng.choice(ODD_VALUES)
    )


def odd_numbers(tree: Tree, rng: random.Random) -> None:
    """NaN, infinity, negative or huge numbers in a tensor."""
    places = _tensors(tree)
    if not places:
        return type_swapped(tree, rng)
    parent, key = rng.choice(places)
    tensor = parent[key] = parent[key].clone()
    if not tensor.numel():
        return None
    numbers = [math.nan, math.inf, -math.inf, 1e30, -1e30] if tensor.is_floating_point() else [-1, 2**62, -(2**62)]
    numbers = [0, 127, 255] if tensor.dtype == torch.uint8 else numbers
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(numbers)
    return None


def negative_variance(tree: Tree, rng: random.Random) -> None:
    places = [(p, k) for p, k in _tensors(tree, True) if str(k).endswith(("running_var", "variances"))]
    if not places:
        return odd_numbers(tree, rng)
    parent, key = rng.choice(places)
    tensor = parent[key] = parent[key].clone()
    tensor.view(-1)[rng.randrange(tensor.numel())] = -rng.choice((1e-30, 1e-3, 1.0, 1e6))
    return None


def another_shape(tree: Tree, rng: random.Random) -> None:
    places = _tensors(tree)
    if not places:
        return type_swapped(tree, rng)
    parent, key = rng.choice(places)
    tensor = parent[key]
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.unsqueeze(0),
        lambda t: t.reshape(-1)[:-1],
        lambda t: t.reshape(-1)[:1],
        lambda t: t.reshape(-1)[:0],
        lambda t: torch.cat([t.reshape(-1)] * 3),
        lambda t: t.sum(),
        lambda t: t.T if t.ndim == 2 and t.shape[0] != t.shape[1] else t.unsqueeze(-1),
    ]
    parent[key] = rng.choice(changes)(tensor)
    return None


def another_dtype(tree: Tree, rng: random.Random) -> None:
    places = _tensors(tree)
    if not places:
        return type_swapped(tree, rng)
    parent, key = rng.choice(places)
    others = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.complex64),
    ]
    parent[key] = parent[key].to(rng.choice([dtype for dtype in others if dtype != parent[key].dtype]))
    return None


def _frames(tree: Tree) -> list[Any]:
    """The coded models of an answer."""
    fields = tree["release"].values() if isinstance(tree["release"], dict) else ()
    return [value["~coded"] for value in fields if isinstance(value, dict) and "~coded" in value]


def odd_code(tree: Tree, rng: random.Random) -> None:
    """A coded model with other numbers, steps that are none, too many bytes or too few, or a frame that grows."""
    frames = _frames(tree)
    if not frames:
        return odd_numbers(tree, rng)
    frame = rng.choice(frames)
    raw = bytearray(zstandard.ZstdDecompressor().decompress(frame["data"].numpy().tobytes()))
    lie = rng.choice(("numbers", "numbers", "not a number", "longer", "shorter", "bomb", "unsized", "two", "plain"))
    if lie == "numbers":
        for _ in range(rng.choice((1, 8, 64, 512))):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif lie == "not a number":
        start = rng.randrange(len(raw))
        raw[start : start + 400] = b"\xff\x7f" * (len(raw[start : start + 400]) // 2)
    elif lie in ("longer", "shorter"):
        raw = raw + b"\0" * rng.choice((1, 4, 600)) if lie == "longer" else raw[: -rng.choice((1, 2, 513))]
    elif lie == "bomb":
        raw = bytearray(rng.choice((2**22, 2**24)))
    packed = zstandard.ZstdCompressor(write_content_size=lie != "unsized").compress(bytes(raw))
    packed = packed + packed if lie == "two" else bytes(raw) if lie == "plain" else packed
    frame["data"] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return None


def odd_wire(tree: Tree, rng: random.Random) -> None:
    """A coded model that says something else of itself."""
    frames = _frames(tree)
    if not frames:
        return type_swapped(tree, rng)
    changes = [
        {"format": rng.choice((0, 2, True, 1.0, "1"))},
        {"coding": rng.choice(("full", "bf16", "int8", "int4", "topk", "none", 4))},
        {"base": "0" * 64},
        {"layout": '{"tree":"{}","tensors":[["float32",[1099511627776]]]}'},
        {"answer": rng.choice(("int4", "none", None))},
        {"data": torch.zeros(rng.choice((0, 8)), dtype=rng.choice((torch.uint8, torch.int64)))},
    ]
    rng.choice(frames).update(rng.choice(changes))
    return None


def forged_count(tree: Tree, rng: random.Random) -> None:
    """A number of samples that the site does not have."""
    release = tree["release"]
    names = [key for key in release if key in ("samples", "dropped")]
    if not names:
        return forged_scores(tree, rng)
    release[rng.choice(names)] = rng.choice((0, -1, -(10**6), 10**4, 10**12, 10**18, 2**63 - 1))
    return None


def forged_scores(tree: Tree, rng: random.Random) -> None:
    """A confusion matrix of other samples than the split has."""
    places = [(p, k) for p, k in _places(tree["release"]) if k in ("confusion", "counts")]
    if not places:
        return odd_numbers(tree, rng)
    parent, key = places[0]
    matrix = parent[key] = parent[key].clone()
    lie = rng.choice(("one more", "one less", "negative", "10,000 right", "overflow", "empty"))
    if lie in ("one more", "one less"):
        cell = rng.choice(matrix.view(-1).nonzero().flatten().tolist() or [0])
        matrix.view(-1)[cell] += 1 if lie == "one more" else -1
    elif lie == "negative":
        matrix.view(-1)[0] += 50
        matrix.view(-1)[-1] -= 50
    elif lie == "10,000 right":
        matrix.zero_().view(-1)[0] = 10_000
    elif lie == "overflow":
        matrix.fill_(2**62)
    else:
        matrix.zero_()
    return None


def forged_time(tree: Tree, rng: random.Random) -> None:
    tree["seconds"] = rng.choice(
        ("nan", "inf", "-1.000", "1e400", "9" * 400, "999999999.000", -1, math.nan, 10**400, "١.٠")
    )


def forged_code(tree: Tree, rng: random.Random) -> None:
    tree["code"] = rng.choice(
        ("site-failed", "\x1b[2J\x1b[31mowned", "x" * 10_000, "", "../../etc/passwd", 7, True, ["a"], {})
    )


def forged_facts(tree: Tree, rng: random.Random) -> None:
    facts = tree["release"].get("facts")
    if not facts:
        return type_swapped(tree, rng)
    facts[rng.choice(sorted(facts))] = rng.choice(
        [
            5,
            -5,
            ["\x1b[2J"] * 3,
            ["a"] * 70_000,
            ["x" * 300],
            "x" * 300,
            {"train": -1},
            {"train": 10**13},
            math.inf,
            None,
        ]
    )
    return None


def bomb(tree: Tree, rng: random.Random) -> None:
    """Much more than was asked for, in few bytes."""
    kind = rng.choice(("lists", "deep", "texts", "maps"))
    contents: dict[str, Any] = {
        "lists": [[] for _ in range(30_000)],
        "deep": _nested(200),
        "texts": ["", "\U0001f600"] * 15_000,
        "maps": [{} for _ in range(30_000)],
    }
    parent, key = rng.choice([place for place in _places(tree) if isinstance(place[0], dict)])
    parent[key] = contents[kind]


BYTES = (bits_flipped, cut, spliced, another_header_length)
TREES = (
    *(type_swapped, type_swapped, field_missing, field_extra, odd_numbers, negative_variance, another_shape),
    *(another_dtype, forged_count, forged_scores, forged_time, forged_code, forged_facts, odd_code, odd_wire),
)


def corrupted(asked: Asked, rng: random.Random) -> tuple[str, bytes]:
    """What was done to the answer, and what came of it."""
    if rng.random() < 0.3:
        damage = rng.choice(BYTES)
        return damage.__name__, damage(asked.data, rng)
    tree = _shallow(asked.tree)
    # Bombs take long to make.
    change = bomb if rng.random() < 0.0005 else rng.choice(TREES)
    change(tree, rng)
    if rng.random() < 0.1 and isinstance(tree.get("release"), dict) and tree["release"]:
        type_swapped(tree, rng)
    return change.__name__, forged(tree)


def _shallow(tree: Any) -> Any:
    """A copy whose tensors are the same ones."""
    if isinstance(tree, dict):
        return {key: _shallow(value) for key, value in tree.items()}
    return [_shallow(value) for value in tree] if isinstance(tree, list) else tree


# --- Lies ---------------------------------------------------------------------------------------------------------


def lies(asked: Asked, admitted: Any) -> list[str]:
    """What is not true of an admitted answer. The honest one says what it has to be like."""
    found = []
    if not 0 <= admitted.seconds <= asked.waited:
        found.append("seconds")
    for field, kind in fields_of(asked.step.release).items():
        ours, theirs = getattr(asked.release, field), getattr(admitted.release, field)
        if kind.name == "count" and not (type(theirs) is int and 1 <= theirs <= asked.sizes["train"]):
            found.append("count")
        if kind.name == "tally" and not (type(theirs) is int and 0 <= theirs <= 100):
            found.append("tally")
        if kind.name == "metric" and not (type(theirs) is float and abs(theirs) < 1e10):
            found.append("metric")
        if kind.name == "facts":
            found += _lies_in_text(theirs)
        if kind.name == "counts":
            found += _lies_in_scores(ours, theirs)
        if kind.name == "mixture" and theirs:
            found += _lies_in_mixture(ours, theirs, asked.sizes["train"])
        if kind.name in ("weights", "statistics", "spectra", "features"):
            found += _lies_in_tensors(ours, theirs)
    return found


def _lies_in_scores(ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return ["scores"]
    cells = [int(cell) for cell in theirs.flatten()]
    # Of masks some pixels may have no label.
    total, most = sum(cells), int(ours.sum())
    return [] if min(cells, default=0) >= 0 and (total == most if most < SIDE * SIDE else total <= most) else ["scores"]


def _lies_in_mixture(ours: Mapping[str, Any], theirs: Mapping[str, Any], samples: int) -> list[str]:
    is_alike = set(ours) == set(theirs) and all(
        ours[key].dtype == theirs[key].dtype and ours[key].ndim == theirs[key].ndim for key in ours
    )
    if not is_alike:
        return ["mixture"]
    size, dimensions = theirs["means"].shape
    is_sound = (
        dimensions == ours["means"].shape[1]
        and theirs["variances"].shape == (size, dimensions)
        and theirs["weights"].shape == theirs["counts"].shape == (size,)
        and bool((theirs["variances"] > 0).all())
        and 1 <= int(theirs["counts"].min()) <= int(theirs["counts"].max()) <= samples
        and all(bool(torch.isfinite(value).all()) for value in theirs.values())
    )
    return [] if is_sound else ["mixture"]


def _lies_in_tensors(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    if set(ours) != set(theirs):
        return ["keys"]
    found = []
    for key, tensor in theirs.items():
        if tensor.shape != ours[key].shape or tensor.dtype != ours[key].dtype:
            found.append("layout")
        elif not bool(torch.isfinite(tensor).all()):
            found.append("non-finite")
        elif str(key).endswith(("running_var", "num_batches_tracked")) and bool((tensor < 0).any()):
            found.append("negative")
    return found


def _lies_in_text(facts: Any) -> list[str]:
    if isinstance(facts, Mapping):
        return [lie for key, value in facts.items() for lie in (*_lies_in_text(key), *_lies_in_text(value))]
    if isinstance(facts, list | tuple):
        return [lie for value in facts for lie in _lies_in_text(value)]
    is_safe = not isinstance(facts, str) or (len(facts) <= 200 and all(sign.isprintable() for sign in facts))
    return [] if is_safe and not isinstance(facts, torch.Tensor) else ["text"]


# --- Memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Learned(Release):
    model: Weights
    samples: Count


_LARGE: Step[_Learned] = Step("fuzz.learn", lambda: None, Labelled, _Learned, {})
_NUMBERS = 12_000_000
_QUESTION = Request("a", "fuzz.learn", 1, "n", b"")
_WHAT_IS_THERE = Request("a", introduce.name, 0, "n", b"")
MESSAGES = ("honest", "lists", "deep", "texts", "offsets", "tensors", "facts", "names")


def _asked(kind: str) -> dict[str, torch.Tensor]:
    """The model of the question."""
    layers = {f"layer.{number}.weight": torch.zeros(100) for number in range(20_000)}
    return layers if kind == "layers" else {"w": torch.zeros(_NUMBERS)}


def _large(kind: str) -> bytes:
    """An honest answer of 48 MB, one of 10 MB in 20,000 layers, or as much of something that takes more memory than it
    has bytes."""
    model: Any = _asked(kind)
    if kind == "tensors":
        model = {str(number): torch.zeros(0) for number in range(200_000)}
    release: Any = {"model": model, "samples": 1}
    if kind in ("facts", "names"):
        many = {str(number): [f"k{name}" for name in range(60_000)] for number in range(4)}
        release = {"facts": {"classes": "a" * 4_000_000 + "\U0001f600"} if kind == "facts" else many}
    elif kind not in ("honest", "layers", "tensors"):
        release = None
    question = _WHAT_IS_THERE if kind in ("facts", "names") else _QUESTION
    envelope = question.head | {"code": None, "release": release, "clipped": 0, "seconds": "00000001.000"}
    data = forged(envelope)
    contents = {
        "lists": "[" + "[]," * 4_700_000 + "[]]",
        "deep": "[" * 14_000_000,
        "texts": '["' + "a" * 14_000_000 + "\U0001f600" + '"]',
        "offsets": "[" + '"data_offsets",[],[],' * 700_000 + "[]]",
    }
    if kind not in contents:
        return data
    header = json.dumps({"__metadata__": {"fedshift": contents[kind]}}, ensure_ascii=False).encode()
    return struct.pack("<Q", len(header)) + header


def _measure(file: str) -> None:
    """Prints the peak memory of admitting the message in a file, as a multiple of its bytes."""
    is_large = Path(file).name not in ("facts", "names")
    asked: tuple[Any, ...] = (_WHAT_IS_THERE, introduce, {})
    if is_large:
        asked = (_QUESTION, _LARGE, {"model": _asked(Path(file).name)})

    def show(data: bytes) -> str:
        try:
            admit(data, *asked, 1e6, {"train": 5}, 1.0)
        except (Refused, Failed):
            return "refused"
        return "admitted"

    show(b"")
    little = {"w": torch.zeros(1)}
    envelope = _QUESTION.head | {"code": None, "release": {"model": little, "samples": 1}, "clipped": 0}
    admit(forged(envelope | {"seconds": "1.0"}), _QUESTION, _LARGE, {"model": little}, 1e6, {"train": 5}, 1.0)
    before = _resident("VmRSS")
    data = Path(file).read_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    outcome = show(data)
    peak = _resident("VmHWM") - before
    print(json.dumps([outcome, 0.0 if peak <= ALWAYS_ALLOWED and not is_large else peak / len(data)]))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def memory_ratios(messages: Iterable[str] = MESSAGES) -> dict[str, float]:
    """Message -> peak memory of admitting or refusing it, with the message itself, by its bytes (Linux). Of what a site
    says of itself, 0 if it is within `ALWAYS_ALLOWED`."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in messages:
            file = Path(folder) / kind
            file.write_bytes(_large(kind))
            done = subprocess.run([sys.executable, __file__, "--measure", str(file)], capture_output=True, check=True)
            outcome, ratio = json.loads(done.stdout)
            assert outcome == ("admitted" if kind in ("honest", "layers", "names") else "refused"), (kind, outcome)
            found[kind] = ratio
    return found


# --- All of it ----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    tried: int = 0
    admitted: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    failed: Counter[str] = dataclasses.field(default_factory=Counter)
    exceptions: list[str] = dataclasses.field(default_factory=list)
    lies: list[str] = dataclasses.field(default_factory=list)


def attack(answers: list[Asked], corruptions: int, seed: int = 0) -> Tally:
    """Shows the gate so many corrupted answers, of all kinds in turn."""
    tally = Tally()
    for number in range(corruptions):
        asked, rng = answers[number % len(answers)], random.Random(f"{seed}/{number}")
        kind, data = corrupted(asked, rng)
        case = f"{asked.name}, {asked.step.name}, {kind}, number {number}"
        tally.tried += 1
        try:
            admitted = asked.shown(data)
        except Refused as refused:
            tally.refused[refused.reason] += 1
        except Failed as failed:
            tally.failed[failed.code] += 1
            if failed.code not in CATALOGUE and failed.code != UNKNOWN_CODE:
                tally.lies.append(f"{case}: code {failed.code[:20]!r}")
        except Exception as error:
            tally.exceptions.append(f"{case}: {type(error).__name__}: {str(error)[:200]}")
        else:
            tally.admitted += 1
            tally.lies += [f"{case}: {lie}" for lie in lies(asked, admitted)]
    return tally


def main() -> None:
    corruptions = int(sys.argv[1]) if len(sys.argv) > 1 else CORRUPTIONS
    started = time.perf_counter()
    answers = honest_answers(METHODS.builtin)
    tally = attack(answers, corruptions)
    for line in (*tally.exceptions[:20], *tally.lies[:20]):
        print(line, file=sys.stderr)
    ratios = memory_ratios()
    print(
        json.dumps(
            {
                "answers": len(answers),
                "tried": tally.tried,
                "admitted": tally.admitted,
                "refused": dict(tally.refused.most_common()),
                "failed": dict(tally.failed.most_common()),
                "exceptions": len(tally.exceptions),
                "lies_accepted": len(tally.lies),
                "memory": {kind: round(ratio, 2) for kind, ratio in ratios.items()},
                "seconds": round(time.perf_counter() - started),
            }
        )
    )
    sys.exit(bool(tally.exceptions or tally.lies or max(ratios.values()) > MEMORY_BOUND))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _measure(sys.argv[2])
    else:
        main()
