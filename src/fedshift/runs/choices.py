"""What `auto` and an open key become in a run, and the sentence that tells the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fedshift.data.domain import Dataset
from fedshift.errors import InputError
from fedshift.federation.engines.workers import MOST_ROUNDS
from fedshift.federation.policy import MOST_QUESTIONS, Policy
from fedshift.federation.releases import KINDS
from fedshift.methods import find_about
from fedshift.methods.base import PRETRAINED, About
from fedshift.nn.archs import find_arch
from fedshift.runs.config import DEFAULTS, Norm, RunConfig, statistics_needed
from fedshift.runs.roles import Roles

_SMALL_IMAGE = 40


def completed(config: RunConfig, dataset: Dataset, roles: Roles) -> RunConfig:
    """Every key that was left open, decided and written down."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("config-value", "device: this machine has no CUDA device; use cpu")
    arch = _arch(dataset) if config.arch == "auto" else config.arch
    about = find_about(config.method)
    chosen = {**DEFAULTS, "lr": find_arch(arch).lr, **about.defaults}
    pretrained = _chosen_for(config, about, dataset)
    own = {key: value for key, value in pretrained.pop(about.name, {}).items() if key not in config.given}
    norm = _norm(config, about, roles, {**config.hyper, **own})
    if config.hyper.get("statistics") == "auto":
        own["statistics"] = "client" if norm == "own" else "home"
    values = {key: value for key, value in (chosen | pretrained).items() if getattr(config, key) is None}
    setting = roles.setting
    is_many = setting == "multi-adapt"
    return config.model_copy(
        update={
            **values,
            "hyper": {**config.hyper, **own},
            "arch": arch,
            "tile": dataset.tile,
            "norm": norm,
            "freeze_norm": norm == "frozen",
            "setting": setting,
            "sources": None if is_many else config.sources or tuple(n for n in dataset.domains if n != config.target),
            "targets": roles.tested if is_many else None,
        }
    )


def for_pretrained(config: RunConfig, about: About) -> dict[str, Any]:
    """What is chosen for a network that starts from given weights: values of common keys, and the method's own under
    its name. Nothing for one that starts from scratch."""
    if config.weights is None:
        return {}
    chosen = {**PRETRAINED, **about.pretrained}
    if not may_probe(config) or about.aggregation == "own":
        del chosen["probe_epochs"]
    is_average = about.needs_statistics and (config.norm in ("average", "own") or config.freeze_norm is False)
    if is_average or "preset" in config.given:
        chosen.pop(about.name, None)  # They belong to frozen statistics; a preset has values of its own.
    return chosen


def _for_data(config: RunConfig, about: About, dataset: Dataset) -> dict[str, Any]:
    """What is chosen for table rows, and for masks from scratch: values of common keys, and the method's own under its
    name."""
    if len(dataset.input_shape) == 1:
        return dict(about.tables)
    return dict(about.masks) if dataset.task == "segmentation" and config.weights is None else {}


def _chosen_for(config: RunConfig, about: About, dataset: Dataset) -> dict[str, Any]:
    """All that is chosen for given weights and for the kind of data."""
    chosen = for_pretrained(config, about) | _for_data(config, about, dataset)
    if dataset.task != "classification":
        chosen.pop("probe_epochs", None)
    return chosen


def _norm(config: RunConfig, about: About, roles: Roles, hyper: Mapping[str, Any]) -> Norm:
    """Whose statistics normalise, where that was left open, given the method's complete own keys; and whether it can be
    so in this setting."""
    norm = config.norm
    asked = config.hyper.get("statistics", "auto")
    if norm == "auto" and config.freeze_norm is not None:
        norm = "frozen" if config.freeze_norm else "average"
    elif norm == "auto" and asked != "auto":
        norm = "own" if asked == "client" else "average"
    elif norm == "auto" and about.norm:
        norm = about.norm
    elif norm == "auto" and config.weights is not None and not statistics_needed(about.name, hyper):
        norm = "frozen"
    elif norm == "auto":
        # Where no difference was measured, methods are what their papers say.
        norm = about.best_norm if about.best_norm and roles.setting != "generalize" else "average"
    if asked != "auto" and (asked == "client") != (norm == "own"):
        raise InputError("config-value", f"{about.name}.statistics={asked} contradicts norm={norm}: leave it out")
    if norm != "own":
        return norm
    if roles.setting == "generalize":
        raise InputError(
            "config-value",
            "norm=own: a place that nobody has seen has no statistics of its own. Use norm=average or norm=frozen,"
            " or adapt to a target (--setting adapt).",
        )
    if not any(person.role == "unlabelled" for person in roles.everyone):
        raise InputError(
            "config-value", f"norm=own: {about.name} does not see the target without labels. Leave it out."
        )
    return norm


def told_choices(config: RunConfig, complete: RunConfig, dataset: Dataset) -> str:
    """A sentence on what was chosen by `auto`, and from what; empty where there was no choice."""
    about = find_about(config.method)
    if config.tile == "auto" and dataset.task == "segmentation":
        seen = "as a whole: they are small" if complete.tile is None else f"in squares of {complete.tile} pixels"
        return f"tile: pictures are seen {seen}"
    chosen = _chosen_for(config, about, dataset)
    own = chosen.pop(about.name, {})
    told = [f"{key}={getattr(complete, key)}" for key in chosen if getattr(config, key) is None]
    is_open = config.norm == "auto" and config.freeze_norm is None
    if is_open and config.weights:
        told.append(f"norm={complete.norm}")
    told += [f"{about.name}.{key.rstrip('_')}={value}" for key, value in own.items() if key not in config.given]
    if told:
        what, where = "pre-trained network", "photographs"
        if _for_data(config, about, dataset):
            what, where = ("table rows", "tables") if len(dataset.input_shape) == 1 else ("masks", "street scenes")
        return f"{what}: {', '.join(told)} (what worked on {where}; --set KEY=VALUE changes it)"
    if not is_open or complete.setting == "generalize" or config.hyper.get("statistics", "auto") != "auto":
        return ""
    if complete.norm == "own" and not about.norm:
        reason = "what was measured to be best; --set norm=average is the paper's"
    elif complete.norm == "own":
        reason = f"that is what {about.name} is"
    else:
        reason = "as papers have it, not what was measured best"
    return f"chosen: norm={complete.norm} ({reason})"


def _arch(dataset: Dataset) -> str:
    if len(dataset.input_shape) == 1:
        return "mlp"
    if dataset.task == "segmentation":
        return "segnet-small" if dataset.tile is None else "unet-small"
    return "digits-copa" if max(dataset.input_shape[1:]) <= _SMALL_IMAGE else "resnet18"


def may_probe(config: RunConfig) -> bool:
    """Whether sites may give one more answer, that of `probe_epochs`: no sum hides it, and no budget counts it."""
    return not config.secure_aggregation and simulated_policy(config).promise is None


def simulated_policy(config: RunConfig) -> Policy:
    """The policy of sites that are played on one machine. The data are all the user's own: every kind may leave unless
    `policy.allow` says otherwise, runs are as long as they like, and splits of any size are scored unless the policy
    says how many samples things are made of. A site elsewhere has the policy of its own file."""
    scored = {} if "min_samples" in config.policy else {"min_scored": 1}
    long = {"max_rounds": MOST_ROUNDS, "max_questions": MOST_QUESTIONS, "max_resumes": MOST_QUESTIONS}
    return dataclasses.replace(Policy(), **{"allow": KINDS, **scored, **long, **config.policy})
