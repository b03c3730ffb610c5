"""The configuration of a run: every key, its default and its check. Unknown keys name the nearest known one."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedshift.data.attacks import parse_attack
from fedshift.data.domain import LARGEST_IMAGE, SMALLEST_IMAGE
from fedshift.errors import FedshiftError, InputError, nearest
from fedshift.federation import codec
from fedshift.federation.aggregation import DEFAULT, RULES
from fedshift.federation.compression import Compress
from fedshift.federation.labels import LabelLoss
from fedshift.federation.masking import require_cryptography
from fedshift.federation.plan import Setting
from fedshift.federation.policy import Policy
from fedshift.federation.releases import kinds
from fedshift.federation.step import SUMMABLE
from fedshift.methods import METHODS, find_about, find_method
from fedshift.yamlfiles import YamlError, dump_yaml, load_yaml, read_yaml

Norm = Literal["auto", "average", "frozen", "own"]
"""Whose BatchNorm statistics normalise: the average of the sites', those of the initial weights, or those of the
target or client that uses the model."""


class RunConfig(BaseModel):
    """One run. `None` in a training key means: the method's published value, else the default beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    method: str = "fedavg"
    setting: Setting | None = None
    seed: int = Field(0, ge=0)

    # What to train on.
    dataset: str | None = None
    data_dir: Path | None = None
    label_column: str | None = None
    image_size: int | None = Field(None, ge=SMALLEST_IMAGE, le=LARGEST_IMAGE)
    tile: Annotated[int, Field(ge=SMALLEST_IMAGE, le=LARGEST_IMAGE)] | Literal["auto"] | None = None
    sources: tuple[str, ...] | None = None
    target: str | None = None
    targets: tuple[str, ...] | None = None
    home: str | None = None
    train_per_site: int | None = Field(None, ge=1)
    client_fraction: float = Field(1.0, gt=0, le=1)
    attack: tuple[str, ...] = ()

    # The network.
    arch: str = "auto"
    weights: str | None = None
    norm: Norm = "auto"
    freeze_norm: bool | None = None
    """An older name: true is `norm: frozen`, false `norm: average`."""

    # How sites train.
    rounds: int | None = Field(None, ge=1)
    batch_size: int | None = Field(None, ge=1)
    lr: float | None = Field(None, gt=0)
    lr_min: float | None = Field(None, ge=0)
    backbone_lr_factor: float | None = Field(None, gt=0)
    probe_epochs: int | None = Field(None, ge=0, le=1000)
    momentum: float | None = Field(None, ge=0, lt=1)
    weight_decay: float | None = Field(None, ge=0)
    local_epochs: float | None = Field(None, gt=0)
    schedule: str | None = None
    average_rounds: float | None = Field(None, ge=0, le=1)
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    loss: LabelLoss = "cross-entropy"
    augment: tuple[
        Literal[
            "crop",
            "flip",
            "resized-crop",
            "jitter",
            "grey",
            "standard",
            "standard-unflipped",
            "randaugment",
            "cutout",
        ],
        ...,
    ] = ()

    # How the run goes.
    engine: str = "inprocess"
    federation: Path | None = None
    workers: int | Literal["auto"] = "auto"
    threads: int = Field(1, ge=1)
    device: str = "cpu"
    quorum: float = Field(0.5, gt=0, le=1)
    deadline: float | None = Field(None, gt=0)
    max_update_norm: float = Field(1e6, gt=0)
    sites_per_round: int | float | None = Field(None, gt=0)
    aggregation: str = DEFAULT
    bad_sites: int = Field(1, ge=0)
    secure_aggregation: bool = False
    evaluate_every: int = Field(1, ge=1)
    compress: Compress = "none"
    policy: dict[str, Any] = Field(default_factory=dict)

    hyper: dict[str, Any] = Field(default_factory=dict, exclude=True)
    """The method's own keys; in files and on the command line they stand under the method's name."""
    given: frozenset[str] = Field(default=frozenset(), exclude=True)
    """Those of the method's own keys that the user has set."""

    @model_validator(mode="after")
    def _in_range(self) -> RunConfig:
        if self.workers != "auto" and self.workers < 0:
            raise ValueError("workers: 0 (this process) or more, or auto")
        if isinstance(self.sites_per_round, float) and self.sites_per_round >= 1:
            raise ValueError("sites_per_round: a whole number of sites, or a share above 0 and below 1")
        for text in self.attack:
            parse_attack(text)
        return self

    def to_yaml(self, *, only_given: bool = False) -> str:
        """The complete configuration, ready to be run again; with `only_given`, own keys that the user has not set are
        left to what is chosen for the data and network."""
        values = codec.plain(self.model_dump(mode="json"))
        values[self.method] = codec.plain({k: v for k, v in self.hyper.items() if k in self.given or not only_given})
        return dump_yaml(values)

    def chosen(self) -> dict[str, Any]:
        """What is not as it is by default: the same for equal runs, also when fedshift or the method gets more keys."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        usual = _check_hyper(self.method, {})
        own = {key: value for key, value in self.hyper.items() if value != usual[key]}
        return {**codec.plain(values), "method": self.method, self.method: codec.plain(own)}


DEFAULTS: dict[str, Any] = {
    "rounds": 20,
    "batch_size": 64,
    "lr_min": 0.0,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "local_epochs": 1.0,
    "schedule": "cosine",
    "backbone_lr_factor": 1.0,
    "probe_epochs": 0,
    "average_rounds": 0.0,
}
"""Used where neither the user nor the method's paper gives a value; `lr` comes from the architecture."""


_INNER = ("hyper", "given")

KEYS = tuple(key for key in RunConfig.model_fields if key not in _INNER)
"""Every key but the method's own."""


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked configuration from plain values, with the method's own keys under its name (any case)."""
    given = dict(values)
    about = find_about(str(given.get("method", "fedavg")))
    given["method"] = about.name
    hyper = given.pop(about.name, None) or {}
    for key in given:
        if key not in KEYS:
            if str(key).lower() in METHODS:
                raise InputError("config-key", f"{key}: keys of that method, but the run's method is {about.name!r}")
            known = [*KEYS, about.name]
            raise InputError("config-key", f"unknown configuration key {key!r}. {nearest(str(key), known)}")
    try:
        checked = _check_hyper(about.name, hyper)
        own = frozenset(key for key in checked if key in hyper or key.rstrip("_") in hyper)
        config = RunConfig(**given, hyper=checked, given=own)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise InputError("config-value", f"{where}: {first['msg']} (got {first.get('input')!r})") from None
    _check_types(Policy, config.policy, "policy")
    _check_policy(config.policy)
    _check_norm(config)
    config = _check_secure(config)
    _check_aggregation(config)
    if config.sites_per_round is not None and not about.draws_sites:
        why = about.all_because or "its rounds combine the answers of all sites"
        raise InputError("config-value", f"sites_per_round: {about.name} asks every site in each round, because {why}")
    return config


def _check_secure(config: RunConfig) -> RunConfig:
    """Refuses what needs single values where only sums are to be seen; the rule for averaging is then the mean."""
    if not config.secure_aggregation:
        return config
    name, about = config.method, find_about(config.method)
    for step in find_method(name).steps:
        alone = [
            field
            for field, kind in kinds(step.release).items()
            if kind.name not in SUMMABLE and field not in step.release.summed
        ]
        if alone and not step.scores_only:
            raise InputError(
                "method-needs",
                f"secure_aggregation: {name} uses {', '.join(alone)} of each site by itself (fedshift privacy {name})",
            )
    if about.aggregation != "any":
        raise InputError("method-needs", f"secure_aggregation: {name} does not average models over sites")
    if "aggregation" in config.model_fields_set and config.aggregation != "mean":
        raise InputError(
            "config-value",
            f"aggregation: {config.aggregation} looks at single updates, secure_aggregation hides them: use mean, and"
            " policy.clip_norm at the sites",
        )
    if config.sites_per_round is not None or config.compress != "none":
        raise InputError("config-value", "secure_aggregation: leave out sites_per_round and compress")
    require_cryptography()
    return config.model_copy(update={"aggregation": "mean"})


def _check_policy(policy: Mapping[str, Any]) -> None:
    for key in ("label_column", "classes", "max_classes"):
        if key in policy:
            raise InputError("config-value", f"policy.{key} belongs into the file of a site on another machine")
    Policy(**policy)  # Raises an error that names the key.


def read_config(path: Path, code: str = "config-value") -> dict[str, Any]:
    """The values of a YAML file. One that cannot be used is an error with this code."""
    if not path.exists():
        raise InputError("data-missing", f"there is no configuration file {path}")
    values = read_yaml(path, code) or {}
    if not isinstance(values, dict):
        raise InputError(code, f"{path} must hold keys and values, such as `method: fedavg`")
    return values


def differing_keys(old: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The keys in which a configuration file differs from `config`. A key that the file lacks, because an older version
    wrote it, stands for the default."""
    new: dict[str, Any] = load_yaml(config.to_yaml())
    own = config.method
    if not isinstance(old.get(own) or {}, Mapping):
        return [own]
    return [
        # Before there was such a key, models were averaged by the mean.
        *_differing(
            {"aggregation": "mean", **old, "norm": recorded_norm(old)},
            new,
            {**_defaults(), **DEFAULTS, own: {}},
            skip=own,
        ),
        *(f"{own}.{key}" for key in _differing(old.get(own) or {}, new[own] or {}, codec.plain(_check_hyper(own, {})))),
    ]


def as_recorded(config: RunConfig, path: Path) -> RunConfig:
    """`config`, to go on with the run whose configuration is in `path`: what was left open is as it is there."""
    recorded = read_config(path, "run-corrupt")
    if config.norm == "auto" and config.freeze_norm is None:
        config = config.model_copy(update={"norm": recorded_norm(recorded)})
    if "aggregation" not in config.model_fields_set:
        # Runs of earlier versions averaged without clipping unless told otherwise.
        rule = recorded.get("aggregation", "mean")
        if not isinstance(rule, str):
            raise InputError("run-corrupt", f"{path}: aggregation is {rule!r}, not the name of a rule")
        config = config.model_copy(update={"aggregation": rule})
    if config.precision == "auto" and recorded.get("precision") in ("float32", "bfloat16"):
        config = config.model_copy(update={"precision": recorded["precision"]})
    if config.rounds is None:
        rounds = recorded.get("rounds")
        if type(rounds) is not int or rounds < 1:
            raise InputError("run-corrupt", f"{path}: rounds is {rounds!r}, not a number of rounds")
        config = config.model_copy(update={"rounds": rounds})
    return config


def recorded_norm(old: Mapping[str, Any]) -> Norm:
    """The key `norm` of a complete configuration, also of one from before there was such a key."""
    if "norm" in old:
        found: Norm = old["norm"]
        if found not in typing.get_args(Norm):
            raise InputError("run-corrupt", f"norm: {found!r} in the run's config.yaml is no value of that key")
        return found
    own = old.get(str(old.get("method"))) or {}
    if isinstance(own, Mapping) and own.get("statistics") == "client":
        return "own"
    return "frozen" if old.get("freeze_norm") else "average"


def _defaults() -> dict[str, Any]:
    fields = RunConfig.model_fields.items()
    return {key: codec.plain(field.get_default(call_default_factory=True)) for key, field in fields}


def _differing(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any], skip: str = ""
) -> list[str]:
    keys = [key for key in (*new, *(key for key in old if key not in new)) if key != skip]
    return [key for key in keys if old.get(key, defaults.get(key)) != new.get(key, defaults.get(key))]


def apply_settings(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`values` with `key=value` settings laid over them; a dot reaches into a section (`kd3a.gate=0.9`)."""
    merged = dict(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InputError("config-value", f"--set {setting}: write it as key=value")
        section, dot, inner = key.strip().partition(".")
        try:
            value = load_yaml(text)
        except YamlError:
            value = text
        if isinstance(value, str):
            value = _number(value)
        if dot:
            merged[section] = {**(merged.get(section) or {}), inner: value}
        else:
            merged[section] = value
    return merged


def _number(text: str) -> str | float:
    """YAML reads 1e-3 as text, which nobody expects."""
    try:
        return float(text)
    except ValueError:
        return text


def _check_hyper(method: str, hyper: Any) -> dict[str, Any]:
    """The method's complete hyper-parameters: given values over the paper's. What makes a variant stays as it is."""
    kind = find_method(method).hyper_type
    known = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(hyper, Mapping):
        raise InputError("config-value", f"{method}: must hold keys and values")
    # Words that Python keeps for itself (csac.lambda) are fields with an underscore behind.
    named = {f"{key}_" if f"{key}_" in known else str(key): value for key, value in hyper.items()}
    fixed = find_about(method).hyper
    for key in fixed:
        if named.get(key, fixed[key]) != fixed[key]:
            raise InputError("config-value", f"{method}.{key} is always {fixed[key]}: it is what makes {method}")
    checked = _check_types(kind, named, method)
    try:
        complete = kind(**{**checked, **fixed})
    except FedshiftError as error:
        raise InputError("config-value", error.message) from error
    except ValueError as error:
        raise InputError("config-value", f"{method}: {error}") from error
    return {field.name: getattr(complete, field.name) for field in dataclasses.fields(kind)}


def _check_types(kind: type[Any], values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The values as the fields of the dataclass `kind` have them: checks of ranges may rely on their types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    checked = {}
    for key, value in values.items():
        shown = key.rstrip("_")
        if key not in names:
            known = [name.rstrip("_") for name in names]
            raise InputError("config-key", f"unknown key {section}.{shown}. {nearest(key, known)}")
        try:
            checked[key] = codec.restore(hints[key], codec.plain(value), f"{section}.{shown}")
        except FedshiftError:
            written = json.dumps(codec.plain(value), ensure_ascii=False, default=str)
            wanted = codec.expected(hints[key])
            raise InputError("config-value", f"{section}.{shown}: {written} is not {wanted}") from None
    return checked


def _check_aggregation(config: RunConfig) -> None:
    RULES.find(config.aggregation)
    about = find_about(config.method)
    if about.aggregation != "any" and config.aggregation not in ("mean", "clipped"):
        can_clip = " (mean and clipped can be chosen)" if about.aggregation == "clipped" else ""
        raise InputError(
            "config-value",
            f"aggregation: {config.aggregation!r} needs a method that averages, and {about.name} combines models in its"
            f" own way{can_clip}; leave it out",
        )


def _check_norm(config: RunConfig) -> None:
    about = find_about(config.method)
    if config.freeze_norm is not None and config.norm != "auto" and config.freeze_norm != (config.norm == "frozen"):
        raise InputError(
            "config-value",
            f"freeze_norm={str(config.freeze_norm).lower()} contradicts norm={config.norm}: leave it out",
        )
    if about.norm == "own" and (config.norm not in ("auto", "own") or config.freeze_norm):
        raise InputError("config-value", f"norm is always own with {about.name}: it is what makes {about.name}")
    if not config.freeze_norm and config.norm != "frozen":
        return
    key = "norm=frozen" if config.norm == "frozen" else "freeze_norm"
    if config.weights is None:
        raise InputError(
            "config-value",
            f"{key}: BatchNorm layers of a network from scratch remember nothing that could be kept. "
            "Set weights too (--weights imagenet), or leave it out.",
        )
    why = statistics_needed(config.method, config.hyper)
    if why:
        raise InputError("config-value", f"{key}: {why} Leave {key} out.")


def statistics_needed(method: str, hyper: Mapping[str, Any]) -> str:
    """Why BatchNorm statistics cannot be frozen with a method and its complete own keys; empty where they can be."""
    about = find_about(method)
    if about.needs_statistics:
        return about.needs_statistics(find_method(method).hyper_type(**hyper))
    return f"{about.name} works with what BatchNorm layers remember of each site." if about.uses_statistics else ""
