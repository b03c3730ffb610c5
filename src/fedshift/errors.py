"""Every error a user can meet: what happened, where, what to do. Each code has a section in docs/errors.md."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

BAD_INPUT, SITE_FAILED, STOPPED = 2, 3, 130

CATALOGUE: dict[str, str] = {
    "data-missing": "A folder or file of the data set does not exist.",
    "data-empty": "A domain, split or class has nothing in it.",
    "data-unreadable": "An image or table cannot be decoded, or is too large to be decoded safely.",
    "data-labels": "A label or mask id is out of range, or a table's label column is wrong.",
    "data-classes": "Sites do not agree on the list of classes.",
    "data-layout": "A data folder has none of the layouts fedshift reads.",
    "data-checksum": "A downloaded or given file is not the one that was expected.",
    "unknown-name": "A method, data set, domain, architecture or engine of that name does not exist.",
    "code-not-allowed": "A name refers to code in a module that the user has not allowed to be imported.",
    "config-key": "A configuration key does not exist.",
    "config-value": "A configuration value is of the wrong type or out of range.",
    "config-roles": "The roles of the domains contradict each other (say, a target that is also a source).",
    "weights-mismatch": "A weights file does not fit the architecture.",
    "weights-missing": "A weights file or the package that ships it is not there.",
    "run-exists": "The run directory belongs to another configuration, is finished, or is in use.",
    "run-missing": "There is no run in that directory, or it has no trained model yet.",
    "run-corrupt": "A file of the run (its checkpoints, model or results) cannot be read.",
    "model-diverged": "Training ended in a model whose weights are no finite numbers.",
    "disk": "A file of the run could not be written: the disk is full or not writable.",
    "extra-missing": "A command needs packages that are not installed.",
    "export-failed": "A model cannot be written in a format, or the written model predicts something else.",
    "method-needs": "The method cannot run on this data or with this architecture.",
    "open-files": "No more files can be opened: the limit of the process or of the system is reached.",
    "tracker": "A tracker's package is not installed, or what it writes to cannot be written.",
    "site-policy": "A site's own policy forbids what was asked.",
    "privacy-budget": "An answer would go beyond the site's own budget of differential privacy.",
    "site-failed": "A step failed at a site, or too few sites answered.",
    "site-mismatch": "A site runs another version of fedshift, or describes its data differently.",
    "step-unknown": "A site was asked for a step it does not have.",
    "engine-missing": "The package of an engine is not installed.",
    "deploy-project": "The file that describes a federation is not usable.",
    "deploy-kit": "A folder is not a kit of a federation, is damaged, or its certificate has run out.",
    "deploy-port": "The port of the coordinator's server is in use.",
    "server-offline": "The coordinator's server does not answer, or ended.",
    "not-allowed": "The server or a site does not allow this to the user who asked.",
    "ledger-broken": "A site's ledger was changed, or lines of it are missing.",
    "reference-lost": "A site no longer has the model that a change was relative to; it is sent a whole one.",
    "message-invalid": "A message could not be decoded or does not match its declared type.",
}


class FedshiftError(Exception):
    """One clear sentence for the user, a code to look it up by, and the exit code of the command line."""

    exit_code = BAD_INPUT

    def __init__(self, code: str, message: str) -> None:
        assert code in CATALOGUE, f"error code {code!r} is not in the catalogue"
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[FedshiftError], tuple[str, str]]:
        return type(self), (self.code, self.message)


class InputError(FedshiftError):
    """The user's data, configuration or files are not usable as they are."""


class SiteError(FedshiftError):
    """A site failed, or too few sites answered."""

    exit_code = SITE_FAILED


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that somebody who wrote `word` may have meant, capitals apart."""
    options = {option.lower(): option for option in sorted(known)}
    close = difflib.get_close_matches(word.lower(), options, n=1, cutoff=0.55)
    return options[close[0]] if close else None


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the closest known word, or the list of what is known when nothing is close."""
    options = sorted(known)
    close = closest(word, options)
    if close is not None:
        return f"Did you mean {close!r}?"
    return f"Known: {', '.join(options)}." if options else "None are known."
