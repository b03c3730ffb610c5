"""Every method by name. Adding one to fedshift is a file beside this and a line here; a user's own joins with
`register_method`, as an entry point of the group `fedshift.methods`, or by its path, `package.module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fedshift.errors import CATALOGUE, InputError
from fedshift.federation import handshake
from fedshift.federation.step import Step
from fedshift.methods import (
    averaging,
    csac,
    discrepancy,
    dualadapt,
    ensembles,
    evaluation,
    fada,
    fedadg,
    feddg,
    feddg_ga,
    fedomg,
    fedsr,
    guided_head,
    shot,
    transfer,
)
from fedshift.methods.base import About, Entry, Method
from fedshift.methods.copa import copa, copa_uda
from fedshift.methods.fedlooks import fedlooks
from fedshift.methods.kd3a import kd3a
from fedshift.methods.local import SharedModelMethod
from fedshift.registry import Registry

__all__ = [
    "METHODS",
    "About",
    "Entry",
    "Method",
    "evaluation",
    "explain",
    "find_about",
    "find_method",
    "handshake",
    "register_method",
]

C = TypeVar("C")

_BUILTIN = (
    Entry(averaging.FEDAVG, averaging.Averaging),
    Entry(averaging.DEEPALL, averaging.Averaging),
    Entry(averaging.SOURCE_ONLY, averaging.Averaging),
    Entry(averaging.ADABN, averaging.Averaging),
    Entry(averaging.SINGLE_SITE, averaging.Apart),
    Entry(averaging.ORACLE, averaging.Apart),
    Entry(feddg.FEDDG, feddg.FedDG),
    Entry(fedsr.FEDSR, fedsr.FedSR),
    Entry(fedsr.FEDL2R, fedsr.FedSR),
    Entry(fedsr.FEDCMI, fedsr.FedSR),
    Entry(fedadg.FEDADG, fedadg.FedADG),
    Entry(feddg_ga.FEDDG_GA, feddg_ga.FedDGGA),
    Entry(fedomg.FEDOMG, fedomg.FedOMG),
    Entry(guided_head.GUIDED_HEAD, guided_head.GuidedHead),
    Entry(fedlooks.FEDLOOKS, fedlooks.FedLooks),
    Entry(csac.CSAC, csac.Csac),
    Entry(copa.COPA, copa.Copa),
    Entry(copa_uda.COPA_UDA, copa_uda.CopaUda),
    Entry(kd3a.ABOUT, kd3a.KD3A),
    Entry(shot.SHOT, shot.Shot),
    Entry(fada.FADA, fada.Fada),
    Entry(dualadapt.DUALADAPT, dualadapt.DualAdapt),
    Entry(dualadapt.FED_ORACLE, dualadapt.DualAdapt),
    Entry(transfer.FED_DAN, transfer.FedDan),
    Entry(transfer.FED_DANN, transfer.FedDann),
    Entry(discrepancy.FED_MCD, discrepancy.FedMcd),
    Entry(discrepancy.CENT_MCD, discrepancy.CentMcd),
    Entry(ensembles.IND_ENSEMBLE, ensembles.IndEnsemble),
    Entry(ensembles.IND_PARAMAVG, ensembles.IndParamAvg),
    Entry(ensembles.SEQUENTIAL, ensembles.InTurn),
)


def register_method(about: About) -> Callable[[type[C]], type[C]]:
    """Makes a class known as the method that `about` describes: a decorator. What the class leaves out is that of a
    method with one shared model: see `complete`."""

    def decorate(implementation: type[C]) -> type[C]:
        METHODS.register(about.name, complete(implementation, about))
        return implementation

    return decorate


def complete(implementation: type[Any], about: About | None = None) -> Entry:
    """The entry of a class in the table of methods. It must have `steps` and `round`; by default it has no keys
    (`hyper_type`), its state is one shared model (`state_type`, `init`, `models`), and the network is the plan's."""
    name = about.name if about else implementation.__name__.lower()
    steps = getattr(implementation, "steps", ())
    if not callable(getattr(implementation, "round", None)) or not steps or not all(isinstance(s, Step) for s in steps):
        raise InputError(
            "config-value",
            f"method {name!r}: the class {implementation.__name__} needs a method `round(self, state, fed)` and"
            " `steps`, a tuple of functions that are decorated with @step",
        )
    for key, default in vars(SharedModelMethod).items():
        if not key.startswith("__") and not hasattr(implementation, key):
            setattr(implementation, key, default)
    if implementation.__init__ is object.__init__:
        implementation.__init__ = SharedModelMethod.__init__
    return Entry(about or getattr(implementation, "about", None) or About(name, ("generalize",), ""), implementation)


def _as_entry(name: str, value: Any) -> Entry:
    if isinstance(value, Entry):
        return value
    if not isinstance(value, type):
        raise InputError("config-value", f"method {name!r}: {value!r} is not a class")
    known = next((entry for entry in METHODS.registered() if entry.implementation is value), None)
    entry = known or complete(value)
    if ":" in name:  # A path; from here on the run knows the method by its own name.
        METHODS.register(entry.about.name, entry)
    return entry


METHODS: Registry[Entry] = Registry("method", "methods", {entry.about.name: entry for entry in _BUILTIN}, _as_entry)


def find_about(name: str) -> About:
    return _find(name).about


def find_method(name: str) -> type[Method]:
    return _find(name).implementation


def _find(name: str) -> Entry:
    return METHODS.find(name if ":" in name else name.lower())


_DROPPED, _SKIPPED = "dropped.components.", "skipped."


def explain(name: str) -> str | None:
    """A sentence on the counter `name`, or None if no method has such a counter."""
    for entry in METHODS.values():
        if name in entry.about.counters:
            return entry.about.counters[name]
    if name.startswith(_DROPPED):
        site = name.removeprefix(_DROPPED)
        return f"Components of the mixture of {site} had too few samples and did not leave the client."
    site, dot, code = name.removeprefix(_SKIPPED).rpartition(".")
    if name.startswith(_SKIPPED) and dot:
        return f"{site} was left out in a round. {CATALOGUE.get(code, code)}"
    return None
