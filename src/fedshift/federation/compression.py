"""Models in fewer bytes on the wire, for the key `compress`.

A question holds a model as the change to the last one that the site answered for, and says how the site is to code its
answer: as the change to the model of this question. Where a site has no such model, it gets a whole one. What a site
works with is always what the coordinator knows that it decodes to; later changes are relative to that, so that no error
adds up. What coding a site's own change lost is kept at the site and added to its next change, where the coding is
coarse (`int4`, `topk`).

Only models that a step trains are coded. Everything else crosses as it is: scores are those of the model that is saved.

On the wire, `{"~coded": {...}}` stands where the model would be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import zstandard
from torch import Tensor

from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.checks import DTYPES, Expected, Like
from fedshift.federation.releases import Kind, Release, kinds
from fedshift.federation.store import SiteStore
from fedshift.functional.compression import Coding, Form, decode, encode, form_of, most_bytes

if TYPE_CHECKING:
    from fedshift.federation.step import Step

Compress = Literal["none", "bf16", "int8", "int4", "topk"]

FORMAT = 1
"""Of what is on the wire."""
LOST = "reference-lost"
_MARK = "~coded"
_DOWN: Mapping[str, Coding] = {"bf16": "bf16", "int8": "int8", "int4": "int8", "topk": "int8"}
"""How questions are coded, by how answers are. Models in questions are averages: what is lost is lost for all sites."""
_COARSE = ("int4", "topk")
_LEVEL = 3
_GROWTH, _SMALL = 256, 64 * 2**20
"""A whole model may have this many times the bytes of its message, or this many bytes."""


@dataclass(frozen=True)
class Wire:
    """`format` is `FORMAT`. `base` names what the change is relative to: empty in an answer, which is relative to its
    question. `layout` has names, types and shapes of a whole model. `answer` is how the site is to answer. `data` is a
    zstd frame."""

    format: int
    coding: Coding
    base: str
    layout: str
    answer: Compress
    data: Tensor


@dataclass(frozen=True)
class Reference:
    """A tree of tensors that both sides have: `tree` is the tree in JSON, with numbers in place of tensors."""

    digest: str
    tree: str
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, value: Any) -> Reference:
        tensors, tree = codec.flatten(value)
        return cls(codec.content_digest(tensors, {"tree": tree}), tree, tensors)

    @property
    def forms(self) -> list[Form]:
        return [form_of(tensor) for tensor in self.tensors.values()]

    def fits(self, other: Reference) -> bool:
        return self.tree == other.tree and self.forms == other.forms

    def value(self) -> Any:
        return codec.unflatten(self.tensors, self.tree)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Reference:
        named = dict(zip(self.tensors, tensors, strict=True))
        return Reference(codec.content_digest(named, {"tree": self.tree}), self.tree, named)


# --- Questions: the coordinator ---------------------------------------------------------------------------------------


@dataclass
class Sent:
    """What sites are known to have, for checkpoints: site -> field -> digest of a reference."""

    holds: dict[str, dict[str, str]] = field(default_factory=dict)
    references: dict[str, Reference] = field(default_factory=dict)


class Broadcasts:
    """Codes the models in questions. Sites that were sent the same share one reference."""

    def __init__(self, compress: Compress) -> None:
        self._compress = compress
        self._known: dict[str, dict[str, Reference]] = {}
        self._pending: dict[str, dict[str, Reference]] = {}
        self._done: dict[tuple[str, int, str], tuple[dict[str, Any], Reference]] = {}

    def coded(
        self, site: str, payload: Mapping[str, Any], step: Step[Any], plain: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A payload as it is sent, and those of its models that are coded as the site will have them, with what is then
        known of its answer. Answers in the fields `plain` are not coded."""
        wire, decoded = dict(payload), dict[str, Any]()
        released = kinds(step.release)
        if self._compress == "none" or not any(kind.name == "weights" for kind in released.values()):
            return wire, decoded
        for name, hint in step.payload.items():
            if not _is_of_weights(hint) or not _has_tensors(payload[name]):
                continue
            known = self._known.get(site, {}).get(name)
            key = (name, id(payload[name]), known.digest if known else "")
            is_answered = name in released and name not in plain and _is_flat(payload[name])
            answer = self._compress if is_answered else "none"
            if key not in self._done:
                self._done[key] = self._code(payload[name], known, answer)
            wire[name], reference = self._done[key]
            decoded[name] = Update(reference.value(), answer) if answer != "none" else reference.value()
            self._pending.setdefault(site, {})[name] = reference
        return wire, decoded

    def asked(self) -> None:
        """All questions of a step are coded: what was kept for sites that are sent the same may go."""
        self._done.clear()

    def answered(self, site: str) -> None:
        """A site's answer was admitted: it has what it was sent."""
        self._known.setdefault(site, {}).update(self._pending.pop(site, {}))

    def forget(self, site: str) -> None:
        """A site says that it has not: the next question holds whole models."""
        self._known.pop(site, None)
        self._pending.pop(site, None)

    def state(self) -> Sent:
        sent = Sent()
        for site, fields in sorted(self._known.items()):
            sent.holds[site] = {name: reference.digest for name, reference in fields.items()}
            sent.references |= {reference.digest: reference for reference in fields.values()}
        return sent

    def restore(self, sent: Sent) -> None:
        self._known = {
            site: {name: sent.references[digest] for name, digest in fields.items()}
            for site, fields in sent.holds.items()
        }

    def _code(self, value: Any, known: Reference | None, answer: Compress) -> tuple[dict[str, Any], Reference]:
        new = Reference.of(value)
        base = known if known is not None and known.fits(new) else None
        coding: Coding = _DOWN[self._compress] if base else "full"
        before = list(base.tensors.values()) if base else None
        raw = encode(list(new.tensors.values()), before, coding)
        layout = "" if base else _layout(new)
        wire = Wire(FORMAT, coding, base.digest if base else "", layout, answer, _squeezed(raw))
        return {_MARK: codec.plain(wire)}, new.with_tensors(decode(raw, new.forms, before, coding))


def _is_of_weights(hint: Any) -> bool:
    found = [kind for kind in getattr(hint, "__metadata__", ()) if isinstance(kind, Kind)]
    if found:
        return found[0].name == "weights"
    return any(map(_is_of_weights, get_args(hint)))


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values())


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


# --- Questions: the site ----------------------------------------------------------------------------------------------


@dataclass
class Received:
    """The coded fields of a question, decoded, and how each is to be answered."""

    references: dict[str, Reference] = field(default_factory=dict)
    answers: dict[str, Compress] = field(default_factory=dict)

    def keep(self, store: SiteStore, round: int) -> None:
        """What later changes will be relative to. Kept once the step has done its work."""
        for name, reference in self.references.items():
            store.save(f"received-{name}", reference, round)


def received(payload: Mapping[str, Any], store: SiteStore) -> tuple[dict[str, Any], Received]:
    """A payload with its coded fields decoded. FedshiftError for what cannot be decoded."""
    found, decoded = Received(), dict(payload)
    for name, value in payload.items():
        if not is_coded(value):
            continue
        wire = _read_wire(value)
        base = _stored(store, f"received-{name}", wire.base) if wire.base else None
        try:
            reference = _decoded_question(wire, base)
        except Exception as error:  # A hostile message can fail in any part of the decoder.
            raise FedshiftError("message-invalid", f"{name} could not be decoded ({type(error).__name__})") from error
        decoded[name] = reference.value()
        found.references[name], found.answers[name] = reference, wire.answer
    return decoded, found


def _decoded_question(wire: Wire, base: Reference | None) -> Reference:
    if (base is None) != (wire.coding == "full"):
        raise ValueError("a whole model has no base, and a change has one")
    if base is not None:
        raw = _inflated(wire.data, base.forms, wire.coding)
        return base.with_tensors(decode(raw, base.forms, list(base.tensors.values()), wire.coding))
    tree, forms = _read_layout(wire.layout)
    if sum(form.bytes for form in forms) > max(_SMALL, _GROWTH * len(wire.data)):
        raise ValueError("larger than its message allows")
    tensors = decode(_inflated(wire.data, forms, "full"), forms, None, "full")
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    return Reference(codec.content_digest(named, {"tree": tree}), tree, named)


def _stored(store: SiteStore, name: str, digest: str) -> Reference:
    for tree in store.versions(name):
        if tree["digest"] == digest:
            return codec.restore(Reference, tree)
    raise SiteError(LOST, f"the model that a change is relative to is not there any more ({name})")


# --- Answers: the site ------------------------------------------------------------------------------------------------


def coded_release(release: Release, asked: Received, store: SiteStore, round: int) -> dict[str, Any]:
    """The fields of a release that were asked for in coded form, as they are sent."""
    found = {}
    for name, kind in kinds(type(release)).items():
        compress = asked.answers.get(name, "none")
        value = getattr(release, name)
        if compress == "none" or kind.name != "weights" or name not in asked.references:
            continue
        base = asked.references[name].value()
        if not _is_like(value, base):
            continue
        coding: Coding = compress
        tensors, before = [value[key] for key in base], list(base.values())
        if coding in _COARSE:
            tensors = _with_residual(tensors, store.load(f"residual-{name}"))
        raw = encode(tensors, before, coding)
        if coding in _COARSE:
            _keep_residual(tensors, decode(raw, [form_of(one) for one in before], before, coding), store, name, round)
        found[name] = {_MARK: codec.plain(Wire(FORMAT, coding, "", "", "none", _squeezed(raw)))}
    return found


def _is_like(value: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> bool:
    return value.keys() == base.keys() and all(form_of(value[key]) == form_of(base[key]) for key in base)


def _with_residual(tensors: list[Tensor], kept: Any) -> list[Tensor]:
    """With what coding earlier changes lost. Narrow and exact tensors lose next to nothing."""
    if not isinstance(kept, list) or [form_of(one) for one in kept] != [form_of(one) for one in _wide(tensors)]:
        return tensors
    left = iter(kept)
    return [one + next(left) if form_of(one).group == "wide" else one for one in tensors]


def _keep_residual(wanted: list[Tensor], got: list[Tensor], store: SiteStore, name: str, round: int) -> None:
    lost = [want - have for want, have in zip(_wide(wanted), _wide(got), strict=True)]
    # A model that is not finite is refused; its remains would spoil all later ones.
    if all(math.isfinite(float(one.sum())) for one in lost):
        store.save(f"residual-{name}", lost, round)


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one for one in tensors if form_of(one).group == "wide"]


# --- Answers: the coordinator -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update(Like):
    """Tensors like those that the site was sent, which it may have coded as `compress` says."""

    compress: Compress

    def decoded(self, value: Any) -> Any:
        """The tensors of a coded field; what is not coded is returned as it is. ValueError or FedshiftError for what
        cannot be decoded."""
        if not is_coded(value):
            return value
        wire = _read_wire(value)
        if wire.coding != self.compress or wire.base or wire.layout or wire.answer != "none":
            raise ValueError("not coded as it was asked for")
        before = list(self.like.values())
        forms = [form_of(tensor) for tensor in before]
        tensors = decode(_inflated(wire.data, forms, wire.coding), forms, before, wire.coding)
        return dict(zip(self.like, tensors, strict=True))


def like_of(
    release: type[Release], payload: Mapping[str, Any], coded: Mapping[str, Any]
) -> dict[str, Expected | Mapping[str, Tensor]]:
    """What is known of answers from their question: fields of the same name have the same layout."""
    known = {**payload, **coded}
    return {name: known[name] for name in kinds(release) if isinstance(known.get(name), Mapping | Update)}


# --- The wire ---------------------------------------------------------------------------------------------------------


def is_coded(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {_MARK}


def coded_bytes(value: Any) -> int:
    return int(value[_MARK]["data"].nbytes)


def _read_wire(value: Any) -> Wire:
    content = value[_MARK]
    version = content.get("format") if isinstance(content, Mapping) else None
    if type(version) is int and version != FORMAT:
        raise FedshiftError(
            "message-invalid", f"a model is coded in format {version}, and this fedshift reads {FORMAT}"
        )
    wire = codec.restore(Wire, content)
    if wire.format != FORMAT or wire.data.dtype != torch.uint8 or wire.data.ndim != 1:
        raise FedshiftError("message-invalid", "a coded model is a row of bytes")
    return wire


def _layout(reference: Reference) -> str:
    forms = [[str(form.dtype).removeprefix("torch."), list(form.shape)] for form in reference.forms]
    return json.dumps({"tree": reference.tree, "tensors": forms}, separators=(",", ":"))


_DTYPES = {str(one).removeprefix("torch."): one for one in DTYPES}


def _read_layout(text: str) -> tuple[str, list[Form]]:
    layout = json.loads(text)
    forms = []
    for dtype, shape in layout["tensors"]:
        if not all(type(size) is int and 0 <= size < 2**31 for size in shape) or len(shape) > 8:
            raise ValueError("a shape is a few whole numbers")
        forms.append(Form(_DTYPES[dtype], tuple(shape)))
    return str(layout["tree"]), forms


def _squeezed(raw: Tensor) -> Tensor:
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(raw.numpy().tobytes())
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy())


def _inflated(frame: Tensor, forms: Sequence[Form], coding: Coding) -> Tensor:
    """The content of a frame, which must declare no more bytes than tensors of these forms can have. ValueError
    otherwise, before any memory is taken."""
    data = frame.numpy().tobytes()
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 <= size <= most_bytes(forms, coding):
            raise ValueError("of another size than expected")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError("not a frame of zstd") from error
    if len(raw) != size:
        raise ValueError("of another size than it declares")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8)
