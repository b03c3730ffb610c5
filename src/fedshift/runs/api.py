"""The library's front door: `fit` trains, `Run` is what came out of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedshift.errors import InputError, closest
from fedshift.functional.metrics import confusion_matrix
from fedshift.methods.base import SHARED
from fedshift.methods.evaluation import headline
from fedshift.runs.card import skipped_throughout
from fedshift.runs.config import RunConfig, make_config
from fedshift.runs.directory import RunDirectory, read_metrics
from fedshift.runs.execute import run
from fedshift.runs.model_file import SavedModel, load_model, probabilities
from fedshift.runs.progress import Progress

Select = Literal["last", "source-val"]


class Run:
    """A finished run: its results, and its models ready to predict."""

    def __init__(self, path: Path | str) -> None:
        self.directory = RunDirectory(Path(path))
        if not self.directory.done.exists():
            raise InputError("run-missing", f"{path} is not a finished run")
        self.results: dict[str, Any] = json.loads(self.directory.results.read_text())

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row a number: round, phase, site, name, value."""
        return read_metrics(self.directory.metrics)[0]

    def model(self, select: Select = "last") -> SavedModel:
        return load_model(self.directory.model if select == "last" else self.directory.chosen_model)

    def choose(self, saved: SavedModel, site: str | None) -> str:
        """Whose of the saved models predicts for `site`. One that took no part gets the shared model, but a name that
        is nearly that of a site with a model of its own is an error."""
        if site is None or site in saved.models:
            return saved.choose(site)
        own, left_out = ", ".join(saved.own), self.left_out(saved, site)
        if left_out and SHARED not in saved.models:
            raise InputError("unknown-name", f"{left_out}, and there is none to share: name one of {own} with --site")
        like = None if site in self.results.get("samples", ()) else closest(site, saved.own)
        if like is None:
            return saved.choose(site)
        otherwise = "leave --site out for the shared model" if SHARED in saved.models else "there is none to share"
        raise InputError(
            "unknown-name",
            f"--site: this run has no model of {site!r}. Did you mean {like!r}? Clients with a model of their own:"
            f" {own}; {otherwise}",
        )

    def left_out(self, saved: SavedModel, site: str) -> str:
        """Words on a client that has no model of its own where others have, because no round got a usable answer from
        it; nothing for any other site."""
        is_client = self.results["setting"] == "multi-adapt" and site in self.results.get("samples", ())
        if not is_client or site == self.results["home"] or site in saved.models or not saved.own:
            return ""
        counted = (name.rpartition(".") for name in self.results.get("counters", ()))
        codes = sorted(code for what, _, code in counted if what == f"skipped.{site}")
        why = f" ({', '.join(codes)})" if codes else ""
        return f"client {site!r} was left out of training{why} and has no model of its own"

    def predict_proba(self, x: ArrayLike | Tensor, site: str | None = None, select: Select = "last") -> NDArray[Any]:
        """Class probabilities `(n, classes)` (segmentation: `(n, classes, h, w)`). `site` says whose model.

        `x`: images `(n, h, w, 3)` uint8, or `(n, 3, h, w)` float in [0, 1]; or table rows `(n, columns)`.
        """
        saved = self.model(select)
        inputs = as_inputs(x, saved.plan.model.input_shape)
        return probabilities(saved.network(self.choose(saved, site)), inputs).numpy()

    def predict(self, x: ArrayLike | Tensor, site: str | None = None, select: Select = "last") -> NDArray[Any]:
        """Class numbers `(n,)` (segmentation: `(n, h, w)`); `run.results["classes"]` has their names, and
        `run.model().to_ids` makes them the ids of the masks that were learned from."""
        chosen: NDArray[Any] = self.predict_proba(x, site, select).argmax(1)
        return chosen

    def score(self, x: ArrayLike | Tensor, y: ArrayLike, site: str | None = None, select: Select = "last") -> float:
        """Accuracy (segmentation: mean IoU) on labelled inputs, in [0, 1]. `y` has class numbers, 255 for no label."""
        predicted = torch.from_numpy(self.predict(x, site, select))
        labels = torch.as_tensor(np.asarray(y))
        return headline(confusion_matrix(predicted, labels, len(self.results["classes"])), self.results["task"])

    def table(self) -> str:
        """The results per target as text."""
        rules = ("last", "source_val", "oracle")
        lines = [f"{'target':<20}" + "".join(f"{rule:>12}" for rule in rules)]
        skipped = skipped_throughout(self.results)
        for target, scores in self.results["per_target"].items():
            note = "  skipped in every round: learned without it" if target in skipped else ""
            lines.append(f"{target:<20}" + "".join(f"{100 * scores[rule]:>11.1f}%" for rule in rules) + note)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.results['method']} on {self.results['dataset']})"


def fit(
    method: str = "fedavg",
    *,
    out: Path | str | None = None,
    resume: bool = False,
    debug: bool = False,
    progress: Progress | None = None,
    track: Sequence[str] = (),
    **settings: Any,
) -> Run:
    """Trains and returns the finished run. `track` names trackers. `settings` are the configuration's keys (`dataset`,
    `data_dir`, `target`, `rounds`, ...), a method's own as a dictionary under its name. Without `out` the run lives in
    a temporary folder."""
    config = make_config({"method": method, **settings})
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="fedshift-")) / "run"
    run(config, folder, resume=resume, debug=debug, progress=progress, track=track)
    return Run(folder)


def default_out(config: RunConfig) -> Path:
    """runs/METHOD-DATA-TARGET-seedN."""
    data = config.dataset or (config.data_dir.resolve().name if config.data_dir else "data")
    where = config.home or config.target or "all"
    return Path("runs") / f"{config.method}-{data}-{where}-seed{config.seed}".replace("/", "_")


def as_inputs(x: ArrayLike | Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """A user's images or rows as the network takes them."""
    tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
    if tensor.ndim == 4 and tensor.dtype == torch.uint8 and tensor.shape[-1] == 3:
        tensor = tensor.permute(0, 3, 1, 2).float() / 255
    tensor = tensor.float()
    if tuple(tensor.shape[1:]) != tuple(input_shape):
        raise InputError(
            "config-value", f"inputs of shape {tuple(tensor.shape[1:])} given, the model takes {tuple(input_shape)}"
        )
    return tensor
