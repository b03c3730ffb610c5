"""The library's front door: `fit` trains, `Run` is what came out of it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.data.decoding import resize, scaled_size
from fedshift.data.formats.in_memory import SiteData
from fedshift.data.memory import dataset_from, digest_of
from fedshift.errors import InputError, closest
from fedshift.functional.metrics import confusion_matrix
from fedshift.functional.tiles import stitched
from fedshift.methods import METHODS, complete
from fedshift.methods.base import SHARED
from fedshift.methods.evaluation import headline
from fedshift.nn.archs import register_net
from fedshift.registry import allow_import
from fedshift.runs.card import skipped_throughout
from fedshift.runs.config import RunConfig, make_config
from fedshift.runs.directory import RunDirectory, read_metrics
from fedshift.runs.execute import run
from fedshift.runs.files.model import ModelHeader, SavedModel, load_model, probabilities
from fedshift.runs.health import in_percent
from fedshift.runs.planning import IN_MEMORY
from fedshift.runs.progress import Progress, for_python
from fedshift.runs.record import read_results, results_so_far

Select = Literal["last", "source-val"]


class Run:
    """A finished run: its results, and its models ready to predict. `unfinished` allows one that still runs or was
    stopped: then its model is the newest that was scored, and `so_far` says so in words."""

    def __init__(self, path: Path | str, *, unfinished: bool = False) -> None:
        self.directory = RunDirectory(Path(path))
        self.so_far = ""
        if unfinished and not self.directory.done.exists():
            self.results: dict[str, Any] = results_so_far(self.directory.path)
            self.so_far = (
                f"this run is not finished: the model is of round {self.results['scored_round']} of"
                f" {self.results['rounds']}"
            )
        else:
            self.results = read_results(self.directory.path)

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row a number: round, phase, site, name, value."""
        return read_metrics(self.directory.metrics)[0]

    def model(self, select: Select = "last") -> SavedModel:
        if select == "source-val":
            return load_model(
                self.directory.chosen_model, self.directory.digests.get(self.directory.chosen_model.name, "")
            )
        return load_model(self.directory.model, self.results.get("model_sha256", ""))

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

        `x`: images `(n, h, w, 3)` uint8, or `(n, 3, h, w)` float in [0, 1]; or table rows `(n, columns)`. A model that
        sees squares of pictures takes uint8 ones of any size, which are scaled as in training.
        """
        saved = self.model(select)
        net, header = saved.network(self.choose(saved, site)), saved.header
        if header.tiled:
            return _stitched_all(net, x, header)
        return probabilities(net, as_inputs(x, header.input_shape)).numpy()

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

    @property
    def warnings(self) -> list[dict[str, str]]:
        """What is wrong with the run, each with `code`, `site`, `text` and `advice`."""
        return list(self.results.get("warnings", ()))

    def table(self) -> str:
        """The results per target as text: scores in percent with their 95 % intervals, `n` test samples, then
        warnings."""
        results = self.results
        lines = [f"{'target':<20}{'n':>8}{'last':>20}{'source_val':>20}{'oracle':>12}"]
        skipped = skipped_throughout(results)
        for target, scores in results["per_target"].items():
            count = results["samples"].get(target, {}).get("test", 0)
            shown = [in_percent(scores[rule], count, results["task"], unit="%") for rule in ("last", "source_val")]
            note = "  skipped in every round: learned without it" if target in skipped else ""
            lines.append(f"{target:<20}{count:>8,}{shown[0]:>20}{shown[1]:>20}{100 * scores['oracle']:>11.1f}%" + note)
        return "\n".join([*lines, *(f"warning: {found['text']} {found['advice']}" for found in self.warnings)])

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.results['method']} on {self.results['dataset']})"


def fit(
    method: str | type[Any] | Any = "fedavg",
    *,
    data: Mapping[str, SiteData] | str | Path | None = None,
    net: str | nn.Module | Callable[..., nn.Module] | None = None,
    classes: Sequence[str] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    debug: bool = False,
    progress: Progress | bool | None = None,
    track: Sequence[str] = (),
    **settings: Any,
) -> Run:
    """Trains and returns the finished run.

    `method`: a name, a path `package.module:Class`, or a class or object of your own (`fedshift.extend`).
    `data`: a folder, or for each site its arrays `(x, y)`, `x` alone where it has no labels, a dictionary of `train`,
    `val` and `test`, or a torch `Dataset`; `classes` names the classes of integer labels. Built-in and public data sets
    are given as `dataset="digits"` instead.
    `net`: the name of an architecture, a path `package.module:function`, a torch module whose weights are the start, or
    a class or function that makes one from `input_shape` and `classes`.
    `progress=True` shows how far the training is, also in a notebook; an object of your own may do that instead
    (`fedshift.runs.progress.Progress`).
    `track` names trackers. `settings` are the keys of the configuration (`target`, `rounds`, `lr`, ...); a method's own
    are a dictionary under its name. Without `out` the run is kept in a temporary folder."""
    values = {**settings, **_chosen_method(method, settings)}
    if isinstance(net, str):
        values["arch"] = net
    elif net is not None:
        values["arch"] = register_net(net)
    for name in (values["method"], values.get("arch", "")):
        if ":" in name:
            allow_import(name.partition(":")[0])
    dataset = None
    if isinstance(data, str | Path):
        values["data_dir"] = data
    elif data is not None:
        dataset = dataset_from(data, classes=classes)
        values["dataset"] = IN_MEMORY + digest_of(dataset)[:16]
    config = make_config(values)
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="fedshift-")) / "run"
    shown = for_python() if progress is True else progress or None
    run(config, folder, dataset=dataset, resume=resume, debug=debug, progress=shown, track=track)
    return Run(folder)


def _chosen_method(method: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The method's name, and its keys where it is an object that was made with some."""
    if isinstance(method, str):
        return {"method": method}
    implementation = method if isinstance(method, type) else type(method)
    known = next((entry for entry in METHODS.values() if entry.implementation is implementation), None)
    entry = known or complete(implementation)
    name = entry.about.name
    if known is None:
        METHODS.register(name, entry)
    if isinstance(method, type):
        return {"method": name}
    own = {key.rstrip("_"): value for key, value in dataclasses.asdict(method.hyper).items()}
    return {"method": name, name: {**own, **settings.get(name, {})}}


def default_out(config: RunConfig, method: str = "") -> Path:
    """runs/METHOD-DATA-TARGET-seedN."""
    data = config.dataset or (config.data_dir.resolve().name if config.data_dir else "data")
    where = config.home or config.target or "all"
    return Path("runs") / f"{method or config.method}-{data}-{where}-seed{config.seed}".replace("/", "_")


@torch.inference_mode()
def _stitched_all(net: nn.Module, x: ArrayLike | Tensor, header: ModelHeader) -> NDArray[Any]:
    pictures = torch.as_tensor(np.asarray(x))
    given = f"{str(pictures.dtype).removeprefix('torch.')} inputs of shape {tuple(pictures.shape)} given"
    is_right = pictures.ndim == 4 and pictures.shape[-1] == 3 and pictures.dtype == torch.uint8 and pictures.numel() > 0
    _require_inputs(is_right, given, "uint8 images (n, h, w, 3)")
    size = int(pictures.shape[1]), int(pictures.shape[2])
    found = []
    for picture in pictures:
        image = Image.fromarray(picture.numpy())
        scaled = torch.from_numpy(np.array(resize(image, scaled_size(size, header.scaled_to), "stretch")))
        shares = stitched(net, scaled, header.input_shape[1])
        if shares.shape[1:] != size:
            shares = F.interpolate(shares[None], size, mode="bilinear", align_corners=False)[0]
        found.append(shares)
    return torch.stack(found).numpy()


def as_inputs(x: ArrayLike | Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """A user's images or rows as the network takes them. Images: uint8 `(n, h, w, 3)`, `(n, h, w)` or `(n, 3, h, w)`,
    or float `(n, 3, h, w)` or `(n, h, w, 3)` in [0, 1]. All else is an error: a network answers wrong inputs too."""
    tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
    given = f"{str(tensor.dtype).removeprefix('torch.')} inputs of shape {tuple(tensor.shape)} given"
    if len(input_shape) == 1:
        _require_inputs(tensor.ndim == 2 and tensor.shape[1] == input_shape[0], given, f"rows (n, {input_shape[0]})")
        return tensor.float()
    is_bytes = tensor.dtype == torch.uint8
    wanted = "uint8 images (n, h, w, 3), or float ones (n, 3, h, w) with values in [0, 1]"
    _require_inputs(is_bytes or tensor.is_floating_point(), given, f"{wanted}: convert with .astype(np.uint8)")
    if tensor.ndim == 3 and is_bytes:
        tensor = tensor[..., None].expand(-1, -1, -1, 3)
    if tensor.ndim == 4 and tensor.shape[1] != 3 and tensor.shape[-1] == 3:
        tensor = tensor.permute(0, 3, 1, 2)
    images = tensor.float() / 255 if is_bytes else tensor.float()
    _, height, width = input_shape
    _require_inputs(tuple(images.shape[1:]) == tuple(input_shape), given, f"{wanted}, {height} x {width} pixels")
    in_range = bool(((images >= 0) & (images <= 1)).all())  # False for NaN too
    _require_inputs(in_range, f"{given} with values outside of [0, 1], or NaN", wanted)
    return images


def _require_inputs(is_so: bool, given: str, wanted: str) -> None:
    if not is_so:
        raise InputError("config-value", f"{given}; the model takes {wanted}")
