"""From a configuration to everything a run needs: data set, roles, plan, sites, federation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedshift._version import __version__
from fedshift.data import Progress as Reading
from fedshift.data import open_dataset
from fedshift.data.attacks import FORGED, parse_attack
from fedshift.data.domain import VOID, Dataset, DataSource
from fedshift.data.formats.base import CLASS_FILE
from fedshift.data.formats.masks import VOID_NAME, tell_ids
from fedshift.data.registry import opened_once
from fedshift.data.tiling import in_tiles
from fedshift.errors import InputError, nearest
from fedshift.federation.aggregation import least_sites
from fedshift.federation.engines import Engine
from fedshift.federation.engines.inprocess import Parallel, Sequential
from fedshift.federation.engines.workers import can_fork
from fedshift.federation.federation import Federation, Rules
from fedshift.federation.plan import ModelSpec, Plan, Training
from fedshift.federation.sampling import wanted_sites
from fedshift.federation.site import Copied, SiteHost, SiteSpec
from fedshift.machine import keep_freed_memory
from fedshift.methods import find_about, find_method
from fedshift.methods.local import augmentation
from fedshift.nn.archs import build_network, check_input, find_arch
from fedshift.nn.network import Network
from fedshift.nn.weights import imagenet_weights, load_weights
from fedshift.rng import Rng
from fedshift.runs.choices import completed, may_probe, simulated_policy, told_choices
from fedshift.runs.config import RunConfig
from fedshift.runs.precision import with_precision
from fedshift.runs.privacy import require_possible
from fedshift.runs.roles import Participant, Roles, assign_roles

if TYPE_CHECKING:
    from fedshift.runs.engines import Connection

IN_MEMORY = "memory:"
"""How the key `dataset` begins for data that a script gave; their digest follows."""

WORKER = "fedshift.runs.worker"
"""The module that a worker process runs when it is a new interpreter."""


@dataclass(frozen=True)
class Prepared:
    """A run, ready to start. `config` is complete: nothing in it is left to a default any more. `choices` tells the
    user what was chosen for a pre-trained network."""

    config: RunConfig
    dataset: Dataset
    roles: Roles
    plan: Plan
    is_local: bool = True
    choices: str = ""

    def open_dataset(self, source: DataSource) -> Dataset:
        """For sites on this machine: the data is opened once and all of them share it. With sites on other machines the
        coordinator has only its own data, which it opens itself."""
        return self.dataset if self.is_local else open_dataset(source)


def prepare(
    config: RunConfig, dataset: Dataset | None = None, *, is_local: bool = True, reading: Reading | None = None
) -> Prepared:
    """Opens the data, unless it is given, chooses what was left open, and checks that the pieces fit. `reading` hears
    of files that are read."""
    if dataset is None:
        if config.dataset is not None and config.dataset.startswith(IN_MEMORY):
            raise InputError(
                "data-missing",
                "the data of this run was given in memory (fedshift.fit(data=...)): run the script that did so again",
            )
        if config.dataset is None and config.data_dir is None:
            raise InputError("data-missing", "say what to train on: --dataset NAME or --data-dir DIR")
        dataset = open_dataset(data_source(config), reading)
    elif is_local and config.tile is not None and dataset.tile is None:
        dataset = in_tiles(dataset, config.tile)
    # Read once, by whoever asks first: looking the data over and all sites on this machine share it.
    dataset = opened_once(dataset)
    roles = assign_roles(config, dataset)
    _check_attacks(config, dataset, roles)
    dataset = dataclasses.replace(dataset, warnings=(*dataset.warnings, *_check_found_ids(dataset, roles)))
    complete, precision = with_precision(completed(config, dataset, roles), dataset, is_local)
    if complete.weights is not None:
        weights_file(complete)  # Weights that are not there are an error before anything is begun.
    choices = "; ".join(told for told in (told_choices(config, complete, dataset), precision) if told)
    plan = _plan(complete, dataset, roles)
    if is_local:
        require_possible(simulated_policy(complete), plan, complete.norm)
    _check_sites(complete, roles, plan)
    _check_probe(complete, plan)
    return Prepared(complete, dataset, roles, plan, is_local, choices)


def _check_sites(config: RunConfig, roles: Roles, plan: Plan) -> None:
    """Refuses a rule for averaging that needs more sites than train."""
    is_by_clients = find_about(config.method).data == "source-copies"
    training = roles.targets if is_by_clients else plan.sources
    least = least_sites(config.aggregation, config.bad_sites)
    if config.secure_aggregation:
        if config.norm == "own" and roles.setting == "multi-adapt":
            raise InputError(
                "method-needs", "secure_aggregation: with norm=own each client sends statistics: set norm=average"
            )
        least = max(least, simulated_policy(config).min_sites)
        if len(training) < least:
            raise InputError(
                "config-value",
                f"secure_aggregation: {len(training)} sites train, fewer than policy.min_sites ({least})",
            )
    needs = f"aggregation: {config.aggregation} with bad_sites={config.bad_sites} needs at least {least} sites, and"
    if len(training) < least:
        raise InputError(
            "config-value",
            f"{needs} {len(training)} train in this run ({', '.join(training)}): lower bad_sites, or choose clipped or"
            " median",
        )
    if config.sites_per_round is not None:
        drawn = wanted_sites(config.sites_per_round, len(training))
        if drawn < least:
            raise InputError(
                "config-value",
                f"{needs} {drawn} take part in a round: raise sites_per_round, lower bad_sites, or choose clipped or"
                " median",
            )


def _check_probe(config: RunConfig, plan: Plan) -> None:
    """Refuses to train the head alone first where that has no meaning, or another answer of sites no place."""
    if not config.probe_epochs:
        return
    reason = ""
    if plan.model.task != "classification":
        reason = "it is for classification"
    elif find_about(config.method).aggregation == "own":
        reason = f"{config.method} shares nothing between sites"
    elif not may_probe(config):
        reason = "it is neither for secure_aggregation nor for budgets of differential privacy"
    if reason:
        raise InputError("method-needs", f"probe_epochs: {reason}; set it to 0")


def _check_found_ids(dataset: Dataset, roles: Roles) -> list[str]:
    """Checks ids in masks that no labelled site shows, for data whose classes nobody listed. Such an id would become a
    class unnoticed: it is an error at a site of the run, and a warning at a domain that takes no part."""
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


def _check_attacks(config: RunConfig, dataset: Dataset, roles: Roles) -> None:
    # What a site sends can be forged without labels too.
    asked = {name for person in roles.sites if person.role != "held-out" for name in person.domains}
    for attack in map(parse_attack, config.attack):
        if attack.kind == "backdoor" and (dataset.task != "classification" or len(dataset.input_shape) != 3):
            raise InputError("config-value", f"attack {attack}: a trigger is put into images that have classes")
        if attack.kind in FORGED and attack.domain not in asked:
            message = f"attack {attack}: {attack.domain!r} sends nothing it has learned in this run."
            raise InputError("config-roles", f"{message} {nearest(attack.domain, asked)}")
        if attack.kind not in FORGED and attack.domain not in roles.source_domains:
            message = f"attack {attack}: {attack.domain!r} does not train with labels in this run."
            raise InputError("config-roles", f"{message} {nearest(attack.domain, roles.source_domains)}")


def data_source(config: RunConfig) -> DataSource:
    return DataSource(config.dataset, config.data_dir, config.image_size, config.label_column, tile=config.tile)


def base_network(prepared: Prepared) -> tuple[Network, str]:
    """The network before round 1, and a sentence on where its weights come from."""
    spec, config = prepared.plan.model, prepared.config
    seed = Rng.of(config.seed, "init").seed()
    net = build_network(spec.arch, spec.input_shape, len(spec.classes), seed)
    if config.weights is None:
        hint = " (ImageNet weights: --weights imagenet)" if find_arch(spec.arch).imagenet else ""
        return net, f"training {spec.arch} from scratch{hint}"
    report = load_weights(net, weights_file(config))
    return net, f"{spec.arch}: {report.note}"


def weights_file(config: RunConfig) -> Path:
    """The file that a pre-trained network starts from."""
    return imagenet_weights(config.arch) if config.weights == "imagenet" else Path(str(config.weights))


def open_federation(
    prepared: Prepared, sites_folder: Path, *, debug: bool = False, sites: Connection | None = None
) -> Federation:
    """The federation of a run, on this machine unless there is a line to others. Close its engine when done."""
    keep_freed_memory()
    config, roles = prepared.config, prepared.roles
    specs, own = site_specs(prepared, sites_folder)
    home = SiteHost(own, prepared.plan, prepared.open_dataset) if own else None
    return Federation(
        plan=prepared.plan,
        engine=sites.engine(specs, prepared, debug) if sites else local_engine(specs, prepared, debug),
        sources=roles.sources,
        targets=roles.targets,
        home_host=home,
        rules=Rules(
            config.quorum,
            config.deadline,
            config.max_update_norm,
            aggregation=config.aggregation,
            bad_sites=config.bad_sites,
            sites_per_round=config.sites_per_round,
            compress=config.compress,
            secure_aggregation=config.secure_aggregation,
        ),
    )


def site_specs(prepared: Prepared, folder: Path) -> tuple[list[SiteSpec], SiteSpec | None]:
    """The sites that an engine reaches, and the coordinator's own where it has data."""
    sites, home = prepared.roles.sites, prepared.roles.home
    own = _site_spec(home, prepared, folder) if home else None
    return [_site_spec(person, prepared, folder) for person in sites], own


def local_engine(specs: Sequence[SiteSpec], prepared: Prepared, debug: bool) -> Engine:
    """Sites on this machine: one after another in this process, or in worker processes."""
    plan, workers = prepared.plan, _workers(prepared.config, len(specs))
    if debug or workers == 0:
        return Sequential(specs, plan, prepared.open_dataset, debug=debug)
    if can_fork(plan.threads):
        return Parallel.forked(specs, plan, prepared.open_dataset, workers)
    imports = _modules_of_the_user(plan)
    if imports is None or (prepared.config.dataset or "").startswith(IN_MEMORY):
        # Another process could neither find the code nor see the data.
        return Sequential(specs, plan, prepared.open_dataset)
    return Parallel.spawned(specs, plan, WORKER, workers, imports)


def _modules_of_the_user(plan: Plan) -> list[str] | None:
    """The modules that define the method and the network, where these are not fedshift's own; None where one of them is
    in no module that another process could import."""
    arch, _, inside = plan.model.arch.partition(":")
    modules = {find_method(plan.method).__module__, arch if inside else "fedshift"}
    own_net = not inside and find_arch(plan.model.arch).whole is not None
    if "__main__" in modules or own_net:
        return None
    return sorted(module for module in modules if module.partition(".")[0] != "fedshift")


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
    if not prepared.is_local:
        # A site elsewhere has its own data only, perhaps without labels: what all agreed on goes with the question.
        source = dataclasses.replace(source, task=model.task, classes=model.classes)
    return SiteSpec(
        name=person.name,
        role=person.role,
        source=source,
        domains=person.domains,
        folder=folder / person.name,
        policy=simulated_policy(config),
        train_cap=config.train_per_site,
        train_share=share.get(person.name, 1.0),
        device=config.device,
        copies=tuple(Copied(name, share.get(name, 1.0)) for name in person.copies),
        attacks=tuple(a for a in map(parse_attack, config.attack) if a.domain in person.domains),
    )


def _plan(config: RunConfig, dataset: Dataset, roles: Roles) -> Plan:
    arch = find_arch(config.arch)
    check_input(arch, dataset.input_shape)
    kind = arch.kind
    is_map, wants_map = dataset.task == "segmentation", kind == "segmentation"
    if is_map != wants_map and kind != "any":
        raise InputError(
            "method-needs", f"architecture {config.arch!r} is for {kind} data; {dataset.name!r} is a {dataset.task} set"
        )
    if dataset.tile is not None and (why := find_about(config.method).whole_because):
        raise InputError("method-needs", f"tile: {config.method} needs whole pictures, because {why}: leave tile out")
    # Every key of training is one of the configuration's, decided by now.
    training = Training(**{key.name: getattr(config, key.name) for key in dataclasses.fields(Training)})
    plan = Plan(
        version=__version__,
        method=config.method,
        setting=roles.setting,
        sources=roles.sources or ((roles.home.name,) if roles.home else ()),
        seed=config.seed,
        threads=config.threads,
        model=ModelSpec(
            config.arch,
            dataset.task,
            dataset.classes,
            dataset.input_shape,
            dataset.columns,
            bool(config.freeze_norm),
            dataset.tile is not None,
            dataset.scaled_to,
        ),
        training=training,
        hyper=config.hyper,
        secure_aggregation=config.secure_aggregation,
    )
    # What a site would stumble over in its first step is an error before anything starts.
    training.lr_at(1)
    augmentation(plan)
    return plan
