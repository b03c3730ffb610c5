"""Recipes: data set, network and schedule of a table, as in the papers and cut down to minutes on two cores. A workload
is a recipe with the data that it is run on: public, built-in, or the user's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedshift.bench.columns import DomainRoles, Layout
from fedshift.data import DataSource, open_dataset
from fedshift.data.formats.public import PUBLIC, how_to_get
from fedshift.data.index.survey import Survey
from fedshift.data.registry import survey
from fedshift.errors import InputError

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """`settings` are shared by all rows of a table, `by_method` has the exceptions. `targets` are the domains that are
    the target in turn (empty: all), `home` is the labelled domain of multi-adapt. If the user's data have other domain
    names, the first domains take these roles. `names` maps each `{name}` in the settings of rows to its value.
    `layout` replaces the experiment's."""

    dataset: str
    settings: Settings
    by_method: Mapping[str, Settings] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    domains: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    home: str = ""
    names: Settings = field(default_factory=dict)
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if not self.domains:
            assert self.dataset in PUBLIC, f"{self.dataset} is no public data set: its recipe has to name the domains"
            object.__setattr__(self, "domains", tuple(PUBLIC[self.dataset].domains))

    def roles(self) -> DomainRoles:
        wanted = self.targets or self.domains
        known = tuple(name for name in wanted if name in self.domains)
        targets = known if len(known) == len(wanted) else self.domains[: len(wanted)] if self.targets else self.domains
        return DomainRoles(self.domains, targets, self.home if self.home in self.domains else self.domains[0])

    def but(self, by_method: Mapping[str, Settings] | None = None, **settings: Any) -> Recipe:
        """A copy with some settings changed."""
        return replace(self, settings={**self.settings, **settings}, by_method={**self.by_method, **(by_method or {})})

    def with_seeds(self, *seeds: int) -> Recipe:
        return replace(self, seeds=seeds)

    def at(self, *targets: str) -> Recipe:
        """A copy with only these domains as targets, in turn."""
        return replace(self, targets=targets)

    def with_layout(self, layout: Layout) -> Recipe:
        return replace(self, layout=layout)

    def with_names(self, **names: Any) -> Recipe:
        return replace(self, names=names)

    def on_photos(self) -> Recipe:
        """A copy with the network and schedule for photographs, and the roles and seeds of this recipe."""
        kept = {key: self.settings[key] for key in ("setting", "client_fraction") if key in self.settings}
        settings = {**PHOTOS.settings, **kept}
        return replace(self, settings=settings, by_method=PHOTOS.by_method, names={**self.names, **PHOTOS.names})


SMALL_IMAGE = 40
"""Up to this side in pixels, images are for the digit networks."""
STREET_SIZE = 64
"""Side in pixels to which the user's street scenes are scaled."""


@dataclass(frozen=True)
class Workload:
    """`data_keys` are the configuration keys that name the data. `notes` are sentences about them for the reader."""

    title: str
    recipe: Recipe
    data_keys: Mapping[str, Any]
    roles: DomainRoles
    notes: tuple[str, ...] = ()


def named_workload(recipe: Recipe, data_dir: Path | None) -> Workload:
    """The recipe on its own data set: read from `data_dir` if it is public, else built in."""
    name = recipe.dataset
    if name not in PUBLIC:
        note = f"Measured on the built-in {name}: compare rows with each other, not with the paper."
        return Workload(name, recipe, {"dataset": name}, recipe.roles(), (note,))
    if data_dir is None:
        raise InputError("data-missing", f"this suite needs {name}. {how_to_get(name)}")
    inner = data_dir / name
    folder = (inner if inner.is_dir() else data_dir).resolve()
    found = _usable(survey(DataSource(name, folder, recipe.settings.get("image_size"))))
    missing = [domain for domain in recipe.domains if domain not in _names(found)]
    if missing:
        raise InputError("data-missing", f"{folder} lacks {', '.join(missing)} of {name}. {how_to_get(name)}")
    return Workload(name, recipe, {"dataset": name, "data_dir": str(folder)}, recipe.roles())


def user_workload(mini: Recipe, data_dir: Path, names: Sequence[str]) -> Workload:
    """A short recipe on the user's folder. The folder is read as one of the public data sets `names` if possible, else
    as a folder of domains."""
    name, found = _survey(data_dir, names)
    task = open_dataset(DataSource(mini.dataset)).task
    if found.task != task:
        raise InputError("method-needs", f"this suite is about {task}, but {data_dir} holds data for {found.task}")
    is_photo = task == "classification" and len(found.input_shape) == 3 and max(found.input_shape[1:]) > SMALL_IMAGE
    recipe = mini.on_photos() if is_photo else mini
    keys: dict[str, Any] = {"dataset": name, "data_dir": str(data_dir.resolve())}
    if task == "segmentation":
        keys["image_size"] = STREET_SIZE
    domains = _names(found)
    # Built-in images may be scaled down. The user's images keep their size, except for the network for photographs.
    size = recipe.settings.get("image_size") if is_photo else None
    recipe = replace(recipe.but(image_size=size), domains=domains)
    title = name or data_dir.resolve().name
    note = f"Measured on {title} with a schedule cut to minutes: compare rows with each other, not with the paper."
    return Workload(title, recipe, {k: v for k, v in keys.items() if v is not None}, recipe.roles(), (note,))


def _survey(data_dir: Path, names: Sequence[str]) -> tuple[str | None, Survey]:
    if not data_dir.is_dir():
        raise InputError("data-missing", f"there is no folder {data_dir}")
    for name in names:
        try:
            found = survey(DataSource(name, data_dir))
        except InputError:
            continue
        if not found.problems and len(found.domains) > 1:
            return name, found
    return None, _usable(survey(DataSource(None, data_dir)))


def _usable(found: Survey) -> Survey:
    if found.problems:
        raise InputError(found.problems[0].code, found.problems[0].message)
    return found


def _names(found: Survey) -> tuple[str, ...]:
    return tuple(domain.name for domain in found.domains)


# --- Recipes of the papers ------------------------------------------------------------------------------------------

_FROM_IMAGENET: Settings = {
    "weights": "imagenet",
    "image_size": 224,
    "norm": "average",
    "backbone_lr_factor": 1.0,
    "probe_epochs": 0,
}
"""The papers train every layer at one rate and average what BatchNorm layers remember."""
RESNET_18: Settings = {"arch": "resnet18", **_FROM_IMAGENET}
RESNET_101: Settings = {"arch": "resnet101", **_FROM_IMAGENET}
_HYBRID: Settings = {
    "norm_start": "equal",
    "first_judges": "initial",
    "shared_start": 0.0,
    "judges": "sum",
    "magnitude_draw": "fixed",
    "cutout": "auto",
}
"""COPA's hybrid layers, second look, classifiers and judges as in the paper, on a pre-trained network too."""

STANDARD: Settings = {"augment": ["standard"]}
"""Crops, flips and changes of colour. Those of CSAC's code; COPA's paper says no more than "standard augmentation"."""
CROPS: Settings = {"augment": ["resized-crop", "flip"]}
"""KD3A's code, on photographs."""

_COPA: Settings = {"momentum": 0.9, "weight_decay": 5e-4, "batch_size": 30, "local_epochs": 1.0, "schedule": "cosine"}
_CSAC: Settings = {
    "lr": 0.01,
    "momentum": 0.5,
    "weight_decay": 0.0,
    "batch_size": 64,
    "rounds": 40,
    "local_epochs": 10.0,
    "schedule": "constant",
}
"""Sites of the compared methods train as long as CSAC calibrates: the paper does not say how long they train."""

COPA_PACS = Recipe(
    "pacs",
    {**RESNET_18, **_COPA, **STANDARD, "lr": 0.002, "rounds": 40},
    {
        "copa": {"copa": {**_HYBRID, "norm_where": "all"}},
        "csac": {**_CSAC, "csac": {"lambda": 0.6, "acquisition_epochs": 30.0, "calibration_epochs": 10.0}},
    },
)
COPA_OFFICE_HOME = replace(COPA_PACS, dataset="office-home", domains=()).but(
    {"copa": {"copa": {**_HYBRID, "norm_where": "first-block"}}}
)
COPA_DIGITS_DG = Recipe(
    "digits-dg",
    {**_COPA, "arch": "digits-copa", "lr": 0.05, "rounds": 50, "schedule": "step:20:0.1"},
    {"copa": {"copa": {"norm_where": "after-every-conv"}}, "csac": _CSAC},
)
COPA_DIGIT_FIVE = Recipe(
    "digit-five",
    {**_COPA, "setting": "adapt", "arch": "digits-copa5", "lr": 0.05, "batch_size": 256, "rounds": 30},
    {
        "kd3a": {"arch": "digits-kd3a", "batch_size": 100, "rounds": 40, "lr_min": 0.001},
        "shot": {"batch_size": 64, "rounds": 45, "weight_decay": 1e-3, "shot": {"beta": 0.1}},
    },
)
COPA_OFFICE_CALTECH = Recipe(
    "office-caltech10",
    {**RESNET_101, **_COPA, **STANDARD, "setting": "adapt", "lr": 0.002, "rounds": 40},
    {
        "copa-uda": {"copa-uda": {**_HYBRID, "norm_where": "first-stage"}},
        "kd3a": {**CROPS, "batch_size": 32, "lr": 0.005, "lr_min": 0.0001},
        "shot": {"batch_size": 64, "weight_decay": 1e-3, "rounds": 45},
    },
)

CSAC_PACS = Recipe(
    "pacs",
    {**RESNET_18, **_CSAC, **STANDARD},
    {
        "csac": {"csac": {"acquisition_epochs": 30.0, "calibration_epochs": 10.0, "lambda": 0.6}},
        "copa": {"copa": {**_HYBRID, "norm_where": "all"}},
    },
)
CSAC_VLCS = replace(CSAC_PACS, dataset="vlcs", domains=())
CSAC_ROTATED = Recipe(
    "rotated-mnist",
    {**_CSAC, "arch": "digits-csac", "local_epochs": 5.0},
    {"csac": {"csac": {"acquisition_epochs": 30.0, "calibration_epochs": 5.0}}},
)
CSAC_SEVEN = replace(CSAC_PACS, dataset="office-caltech-home", domains=(), targets=("real_world",))

_KD3A: Settings = {
    "setting": "adapt",
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "local_epochs": 1.0,
    "rounds": 40,
    "schedule": "cosine",
}
KD3A_DIGIT_FIVE = Recipe("digit-five", {**_KD3A, "arch": "digits-kd3a", "lr": 0.05, "lr_min": 0.001, "batch_size": 100})
KD3A_OFFICE_CALTECH = Recipe(
    "office-caltech10", {**_KD3A, **RESNET_101, **CROPS, "lr": 0.005, "lr_min": 0.0001, "batch_size": 32}
)
KD3A_DOMAINNET = Recipe(
    "domainnet",
    {**_KD3A, **RESNET_101, **CROPS, "lr": 0.005, "lr_min": 0.0001, "batch_size": 50},
    {"kd3a": {"kd3a": {"gate": 0.8, "gate_end": 0.95}}},
)

DUAL_DIGIT_FIVE = Recipe(
    "digit-five",
    {"setting": "multi-adapt", "arch": "digits-dualadapt-large", "client_fraction": 0.1, "norm": "average"},
    home="mnist",
)
"""The paper's schedule is in a supplement. Here it is the methods' defaults. The network has the size of Table 4."""
DUAL_DOMAINNET = Recipe(
    "domainnet", {**RESNET_101, "setting": "multi-adapt", "client_fraction": 0.1, "lr": 0.005, "batch_size": 64}
)
DUAL_CITIES = Recipe(
    "gta5-crosscity",
    {"setting": "multi-adapt", "arch": "deeplab_mobilenet_v2_half", "image_size": 512, "norm": "average"},
    home="gta5",
)

# --- Recipes cut down to minutes ------------------------------------------------------------------------------------

_DIGITS = ("handwritten", "photo", "typeset", "street", "chalk")
_ANGLES = ("M0", "M15", "M30", "M45", "M60", "M75")
_CITIES = ("riviera", "milltown", "neonbay", "northfjord", "dunes")

_SHORT: Settings = {
    "arch": "digits-copa",
    "image_size": 16,  # a quarter of the time of 32
    "train_per_site": 300,
    "rounds": 24,  # 456 steps per site: after half as many, COPA is still behind FedAvg at its own sources
    "batch_size": 16,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "schedule": "cosine",
    "evaluate_every": 3,
}
_SHORT_CSAC: Settings = {"rounds": 20, "csac": {"acquisition_epochs": 4.0, "calibration_epochs": 1.0}}

DIGITS = Recipe("digits", _SHORT, {"csac": _SHORT_CSAC}, (0,), _DIGITS)
ADAPT_DIGITS = Recipe(
    "digits",
    # Teachers have to become confident between two averages: fewer but longer rounds.
    {**_SHORT, "setting": "adapt", "rounds": 8, "local_epochs": 3.0, "evaluate_every": 1},
    # SHOT: the authors' values for digits, but everyone's batches: 64 of 300 images would be 5 steps per epoch, not 19.
    {"kd3a": {"lr_min": 0.001}, "shot": {"weight_decay": 1e-3, "shot": {"beta": 0.1}}},
    (0,),
    _DIGITS,
)
ROTATED = Recipe(
    "rotated-digits",
    {
        "arch": "digits-csac",
        "image_size": 16,  # the handwritten digits have 8 x 8 pixels
        "train_per_site": 500,
        "rounds": 8,
        "local_epochs": 4.0,
        "batch_size": 32,
        "lr": 0.025,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "schedule": "cosine",
    },
    {"csac": {"rounds": 7, "csac": {"acquisition_epochs": 4.0, "calibration_epochs": 4.0}}},
    (0,),
    _ANGLES,
)
ONE_TO_MANY = Recipe(
    "digits",
    {
        **_SHORT,
        "setting": "multi-adapt",
        "arch": "digits-dualadapt",
        "norm": "average",
        "image_size": 20,
        "train_per_site": 400,
        "client_fraction": 0.1,
        "rounds": 8,
        "evaluate_every": 2,
    },
    {
        # As many passes over the home's data as the other methods make; their first round is pre-training.
        "source-only": {"rounds": 16},
        "adabn": {"rounds": 16},
        "dualadapt": {"rounds": 9, "dualadapt": {"pretrain_epochs": 8.0}},
        "fed-oracle": {"rounds": 9, "fed-oracle": {"pretrain_epochs": 8.0}},
        "fed-mcd": {"fed-mcd": {"repeats": 2}},
        "cent-mcd": {"cent-mcd": {"repeats": 2}},
    },
    (0, 1, 2),
    _DIGITS,
    home="handwritten",
)
ATTACKED = Recipe(
    "rotated-digits",
    {**_SHORT, "train_per_site": 60, "rounds": 5, "local_epochs": 2.0, "batch_size": 10, "evaluate_every": 5},
    {
        # Hybrid layers and second looks need many more rounds; what is averaged and passed on stays the same.
        "copa": {"copa": {"norm": "bn", "augment": False, "first_judges": "none"}},
        "csac": {"rounds": 3, "csac": {"acquisition_epochs": 6.0, "calibration_epochs": 2.0}},
        "kd3a": {"lr_min": 0.001},
    },
    (0,),
    _ANGLES,
    ("M30",),
)
"""Hostile sites: hundreds of trainings, each just long enough to be far above chance where all sites are honest."""
POISONED = ATTACKED.but(
    {
        # Long enough that models are sure of some of the target's images.
        "copa-uda": {"local_epochs": 4.0, "copa-uda": {"norm": "bn", "augment": False, "first_judges": "none"}},
    }
)
"""The same for every method with labelled sites."""
ATTACKED_CLIENTS = Recipe(
    "rotated-digits",
    {
        **_SHORT,
        "setting": "multi-adapt",
        "arch": "digits-dualadapt",
        "norm": "average",
        "image_size": 20,
        "train_per_site": 200,
        "client_fraction": 0.3,
        "rounds": 4,
        "batch_size": 20,
        "evaluate_every": 4,
    },
    {"dualadapt": {"local_epochs": 1.0, "dualadapt": {"pretrain_epochs": 6.0}}},
    (0,),
    _ANGLES,
    home="M30",
)
STREETS = Recipe(
    "streets",
    {
        "setting": "multi-adapt",
        "arch": "segnet-small",
        "norm": "average",
        "rounds": 5,
        "batch_size": 8,
        "lr": 0.05,
        "evaluate_every": 5,
    },
    {
        "source-only": {"rounds": 9},
        "adabn": {"rounds": 9},
        **{name: {"rounds": 6, name: {"pretrain_epochs": 4.0}} for name in ("dualadapt", "fed-oracle")},
        **{name: {name: {"repeats": 2}} for name in ("fed-mcd", "cent-mcd")},
    },
    (0,),
    _CITIES,
)
PHOTOS = Recipe(
    "pacs",
    {
        "arch": "mobilenet_v2",
        "weights": "imagenet",
        "image_size": 64,
        "train_per_site": 200,
        "rounds": 6,
        "evaluate_every": 6,
    },
    {"csac": {"rounds": 4}},  # Its first round begins with two epochs of acquisition.
    (0,),
    names={
        "large": "mobilenet_v2",
        "small": "efficientnet_lite0",
        "small_lr": 0.002,
        # What FedAvg and FedLooks are tuned to from given weights (bench/papers/ours.py).
        "tuned": [],
        "averaged": None,
        "probe": 10,
        "crops": [],
        "own": "auto",
    },
)
"""For the user's photographs: a small network with ImageNet weights, and for each method what a run chooses for it."""
