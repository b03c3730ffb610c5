"""Every method by name. Adding one is a file beside this and a line here."""

from __future__ import annotations

from fedshift.errors import InputError, nearest
from fedshift.federation import handshake
from fedshift.methods import (
    averaging,
    copa,
    copa_uda,
    csac,
    discrepancy,
    dualadapt,
    ensembles,
    evaluation,
    fada,
    fedadg,
    feddg,
    fedsr,
    kd3a,
    shot,
    transfer,
)
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
