"""From a configuration to everything a run needs: data set, roles, plan, sites, federation."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fedshift._version import __version__
from fedshift.data import open_dataset
from fedshift.data.attacks import parse_attack
from fedshift.data.domain import VOID, Dataset, DataSource
from fedshift.data.survey import CLASS_FILE, VOID_NAME, tell_ids
from fedshift.errors import InputError, nearest
from fedshift.federation.engines import Engine
from fedshift.federation.engines.inprocess import Parallel, Sequential
from fedshift.federation.federation import Federation, Rules
from fedshift.federation.plan import ModelSpec, Plan, Training
from fedshift.federation.policy import Policy
from fedshift.federation.site import Copied, SiteHost, SiteSpec
from fedshift.machine import keep_freed_memory
from fedshift.methods import find_about
from fedshift.methods.local import augmentation
from fedshift.nn.archs import build_network, check_input, find_arch
from fedshift.nn.imagenet import imagenet_weights
from fedshift.nn.network import Network
from fedshift.nn.weights import load_weights
from fedshift.rng import Rng
from fedshift.runs.config import DEFAULTS, RunConfig
from fedshift.runs.machines import Remote
from fedshift.runs.roles import Participant, Roles, assign_roles

_SMALL_IMAGE = 40


@dataclass(frozen=True)
class Prepared:
    """A run, ready to start. `config` is complete: nothing in it is left to a default any more."""

    config: RunConfig
    dataset: Dataset
    roles: Roles
    plan: Plan


def prepare(config: RunConfig, dataset: Dataset | None = None) -> Prepared:
    """Opens the data, unless it is given, chooses what was left open, and checks that the pieces fit."""
    if dataset is None:
        if config.dataset is None and config.data_dir is None:
            raise InputError("data-missing", "say what to train on: --dataset NAME or --data-dir DIR")
        dataset = open_dataset(data_source(config))
    roles = assign_roles(config, dataset)
    _check_attacks(config, roles)
    dataset = dataclasses.replace(dataset, warnings=(*dataset.warnings, *_check_found_ids(dataset, roles)))
    complete = _completed(config, dataset, roles)
    return Prepared(complete, dataset, roles, _plan(complete, dataset, roles))


def _check_found_ids(dataset: Dataset, roles: Roles) -> list[str]:
    """Where nobody listed the classes, an id that no labelled site shows must not become one unnoticed: an error where
    a site of the run shows it, a warning where only a domain does that takes no part."""
    learned = {label for name in roles.source_domains for label in dataset.shown_in.get(name, ())}
    taking_part = {name for person in roles.everyone for name in person.domains}
    warnings = []
    for name, shown in dataset.shown_in.items():
        beyond = {label: mask for label, mask in shown.items() if label not in learned}
        if not beyond or not learned:
            continue
        what = f"masks of {name!r} hold {tell_ids(beyond)}, but no mask of {', '.join(roles.source_domains)} does"
        if name in taking_part:
            raise InputError(
                "data-labels",
                f"{what}: list the classes in {CLASS_FILE}, a line for each id from 0 on, `{VOID_NAME}` where an id is"
                f" no class; or give such pixels the value {VOID}",
            )
        warnings.append(f"{what}. They count as classes, since no {CLASS_FILE} says which ids are some")
    return warnings


def _check_attacks(config: RunConfig, roles: Roles) -> None:
    for attack in map(parse_attack, config.attack):
        if attack.domain not in roles.source_domains:
            message = f"attack {attack}: {attack.domain!r} does not train with labels in this run."
            raise InputError("config-roles", f"{message} {nearest(attack.domain, roles.source_domains)}")


def data_source(config: RunConfig) -> DataSource:
    return DataSource(config.dataset, config.data_dir, config.image_size, config.label_column)


def base_network(prepared: Prepared) -> tuple[Network, str]:
    """The network before round 1, and a sentence on where its weights come from."""
    spec, config = prepared.plan.model, prepared.config
    seed = Rng.of(config.seed, "init").seed()
    net = build_network(spec.arch, spec.input_shape, len(spec.classes), seed)
    if config.weights is None:
        hint = " (ImageNet weights: --weights imagenet)" if find_arch(spec.arch).imagenet else ""
        return net, f"training {spec.arch} from scratch{hint}"
    path = imagenet_weights(spec.arch) if config.weights == "imagenet" else Path(config.weights)
    report = load_weights(net, path)
    return net, f"{spec.arch}: {report.note}"


def open_federation(
    prepared: Prepared, sites_folder: Path, *, debug: bool = False, remote: Remote | None = None
) -> Federation:
    """The federation of a run, on this machine unless there is a line to others. Close its engine when done."""
    keep_freed_memory()
    config, roles = prepared.config, prepared.roles
    specs, own = site_specs(prepared, sites_folder)
    home = SiteHost(own, prepared.plan, open_dataset) if own else None
    engine = remote.engine(specs, prepared.plan) if remote else None
    return Federation(
        plan=prepared.plan,
        engine=engine or _engine(specs, prepared.plan, _workers(config, len(specs)), debug),
        sources=roles.sources,
        targets=roles.targets,
        home_host=home,
        rules=Rules(config.quorum, config.deadline, config.max_update_norm),
    )


def site_specs(prepared: Prepared, folder: Path) -> tuple[list[SiteSpec], SiteSpec | None]:
    """The sites that an engine reaches, and the coordinator's own where it has data."""
    sites, home = prepared.roles.sites, prepared.roles.home
    own = _site_spec(home, prepared, folder) if home else None
    return [_site_spec(person, prepared, folder) for person in sites], own


def _engine(specs: list[SiteSpec], plan: Plan, workers: int, debug: bool) -> Engine:
    return Sequential(specs, plan, debug=debug) if debug or workers == 0 else Parallel(specs, plan, workers)


def _workers(config: RunConfig, sites: int) -> int:
    """Worker processes: as many as cores or sites allow; with one of either, none is worth starting."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = cores // config.threads if config.workers == "auto" else config.workers
    wanted = min(wanted, sites)
    return 0 if wanted < 2 and config.workers == "auto" else wanted


def _site_spec(person: Participant, prepared: Prepared, folder: Path) -> SiteSpec:
    config = prepared.config
    clients = prepared.roles.tested if prepared.roles.setting == "multi-adapt" else ()
    share = dict.fromkeys(clients, config.client_fraction)
    source, model = data_source(config), prepared.plan.model
    if config.engine != "inprocess":
        # A site elsewhere has its own data only, perhaps without labels: what all agreed on goes with the question.
        source = dataclasses.replace(source, task=model.task, classes=model.classes)
    return SiteSpec(
        name=person.name,
        role=person.role,
        source=source,
        domains=person.domains,
        folder=folder / person.name,
        policy=dataclasses.replace(Policy(), **config.policy),
        train_cap=config.train_per_site,
        train_share=share.get(person.name, 1.0),
        device=config.device,
        copies=tuple(Copied(name, share.get(name, 1.0)) for name in person.copies),
        attacks=tuple(a for a in map(parse_attack, config.attack) if a.domain in person.domains),
    )


def _completed(config: RunConfig, dataset: Dataset, roles: Roles) -> RunConfig:
    """Every key that was left open, decided and written down."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("config-value", "device: this machine has no CUDA device; use cpu")
    arch = _choose_arch(dataset) if config.arch == "auto" else config.arch
    lr = find_arch(arch).lr
    chosen = {**DEFAULTS, "lr": lr, **find_about(config.method).defaults}
    values = {key: value for key, value in chosen.items() if getattr(config, key) is None}
    setting = roles.setting
    is_many = setting == "multi-adapt"
    return config.model_copy(
        update={
            **values,
            "arch": arch,
            "setting": setting,
            "sources": None if is_many else config.sources or tuple(n for n in dataset.domains if n != config.target),
            "targets": roles.tested if is_many else None,
        }
    )


def _choose_arch(dataset: Dataset) -> str:
    if len(dataset.input_shape) == 1:
        return "mlp"
    if dataset.task == "segmentation":
        return "segnet-small"
    return "digits-copa" if max(dataset.input_shape[1:]) <= _SMALL_IMAGE else "resnet18"


def _plan(config: RunConfig, dataset: Dataset, roles: Roles) -> Plan:
    arch = find_arch(config.arch)
    check_input(arch, dataset.input_shape)
    kind = arch.kind
    is_map, wants_map = dataset.task == "segmentation", kind == "segmentation"
    if is_map != wants_map:
        raise InputError(
            "method-needs", f"architecture {config.arch!r} is for {kind} data; {dataset.name!r} is a {dataset.task} set"
        )
    # Completed just before: none of these is None any more.
    assert config.rounds and config.batch_size and config.lr and config.local_epochs and config.schedule
    assert config.momentum is not None and config.weight_decay is not None and config.lr_min is not None
    training = Training(
        rounds=config.rounds,
        batch_size=config.batch_size,
        lr=config.lr,
        lr_min=config.lr_min,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        local_epochs=config.local_epochs,
        schedule=config.schedule,
        precision=config.precision,
        augment=config.augment,
        backbone_lr_factor=config.backbone_lr_factor,
    )
    plan = Plan(
        version=__version__,
        method=config.method,
        setting=roles.setting,
        sources=roles.sources or ((roles.home.name,) if roles.home else ()),
        seed=config.seed,
        threads=config.threads,
        model=ModelSpec(
            config.arch, dataset.task, dataset.classes, dataset.input_shape, dataset.columns, config.freeze_norm
        ),
        training=training,
        hyper=config.hyper,
    )
    # What a site would stumble over in its first step is an error before anything starts.
    training.lr_at(1)
    augmentation(plan)
    return plan
