"""Every method by name. Adding one is a file beside this and a line here."""

from __future__ import annotations

from fedshift.errors import InputError, nearest
from fedshift.federation import handshake
from fedshift.methods import averaging, copa, csac, ensembles, evaluation, fedadg, feddg, fedsr
from fedshift.methods.base import About, Entry, Method

__all__ = ["METHODS", "About", "Entry", "Method", "evaluation", "find_about", "find_method", "handshake"]

METHODS: dict[str, Entry] = {
    entry.about.name: entry
    for entry in (
        Entry(averaging.FEDAVG, averaging.Averaging),
        Entry(averaging.DEEPALL, averaging.Averaging),
        Entry(averaging.SOURCE_ONLY, averaging.Averaging),
        Entry(averaging.SINGLE_SITE, averaging.Apart),
        Entry(averaging.ORACLE, averaging.Apart),
        Entry(feddg.FEDDG, feddg.FedDG),
        Entry(fedsr.FEDSR, fedsr.FedSR),
        Entry(fedsr.FEDL2R, fedsr.FedSR),
        Entry(fedsr.FEDCMI, fedsr.FedSR),
        Entry(fedadg.FEDADG, fedadg.FedADG),
        Entry(csac.CSAC, csac.Csac),
        Entry(copa.COPA, copa.Copa),
        Entry(ensembles.IND_ENSEMBLE, ensembles.IndEnsemble),
        Entry(ensembles.IND_PARAMAVG, ensembles.IndParamAvg),
        Entry(ensembles.SEQUENTIAL, ensembles.InTurn),
    )
}


def find_about(name: str) -> About:
    return _find(name).about


def find_method(name: str) -> type[Method]:
    return _find(name).implementation


def _find(name: str) -> Entry:
    entry = METHODS.get(name.lower())
    if entry is None:
        raise InputError("unknown-name", f"There is no method {name!r}. {nearest(name, METHODS)}")
    return entry
