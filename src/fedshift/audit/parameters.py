"""Can the domain of a model be told from its parameters? Distances between many models per domain, layer by layer.

J. Yuan et al.: Collaborative Semantic Aggregation and Calibration for Federated Domain Generalization. IEEE TKDE 2023
(CSAC), Fig. 4. A layer is the last convolution of a stage of the network, as in the paper. Models differ in the order
of their data; with `starts="random"` also in their initial weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import safetensors.torch
import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled, SiteHost
from fedshift.federation.step import fixed_threads, isolated_randomness
from fedshift.files import write_atomically
from fedshift.functional.clusters import Separation, separation
from fedshift.methods import averaging
from fedshift.methods.local import weights_of
from fedshift.nn.network import Network
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.planning import Prepared, base_network, prepare, site_specs

Starts = Literal["same", "random"]


@dataclass(frozen=True)
class DomainModels:
    """`n` models, each trained on one domain. `distances` are L2, layer -> `(n, n)`; `groups`, `(n,)`, are indices into
    `domains`."""

    dataset: str
    arch: str
    starts: Starts
    domains: tuple[str, ...]
    groups: Tensor
    distances: Mapping[str, Tensor]

    def separations(self) -> dict[str, Separation]:
        return {layer: separation(distances, self.groups) for layer, distances in self.distances.items()}

    @property
    def chance(self) -> float:
        """How often the nearest other model would be of the same domain if domains left no trace."""
        models = len(self.groups)
        return (models / len(self.domains) - 1) / (models - 1)


def train_domain_models(
    models: int,
    starts: Starts = "same",
    *,
    seed: int = 0,
    work: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **keys: Any,
) -> DomainModels:
    """Trains `models` models on each domain with FedAvg's site step, in one round of `local_epochs` epochs. `keys` are
    configuration keys. Trained layers are kept in `work`, so that a second call resumes."""
    if models < 2:
        raise InputError("config-value", f"models is {models}: distances within a domain need 2 or more")
    prepared = prepare(make_config({**keys, "method": "fedavg", "rounds": 1, "seed": seed}))
    sites = [person.name for person in prepared.roles.sites]
    if len(sites) < 2:
        raise InputError("method-needs", "domains are compared: two or more are needed")
    layers, groups = [], []
    with tempfile.TemporaryDirectory(prefix="fedshift-parameters-") as folder:
        specs, _ = site_specs(prepared, Path(folder))
        for group, spec in enumerate(specs):
            host = SiteHost(spec, prepared.plan, lambda source: prepared.dataset)
            for number in range(models):
                layers.append(_cached(host, number, starts, prepared, work))
                groups.append(group)
                what = f"{spec.name}, model {number + 1} of {models}, {starts} start"
                progress(what, len(layers), models * len(sites))
    distances = {name: _pairwise(torch.stack([own[name].flatten() for own in layers])) for name in layers[0]}
    arch, name = prepared.plan.model.arch, prepared.dataset.name
    return DomainModels(name, arch, starts, tuple(sites), torch.tensor(groups), distances)


def layers_of(net: Network) -> dict[str, str]:
    """Stage -> the name of its last convolution's weights (dense stages: of the last matrix) in the state dict."""
    found = {}
    for stage in net.backbone.stages:
        prefix = f"backbone.{stage}."
        weights = {name: tensor.ndim for name, tensor in net.named_parameters() if name.startswith(prefix)}
        kernels = [name for name, rank in weights.items() if rank == 4]
        matrices = [name for name, rank in weights.items() if rank == 2]
        if kernels or matrices:
            found[stage] = (kernels or matrices)[-1]
    return found


def _cached(host: SiteHost, number: int, starts: Starts, prepared: Prepared, work: Path | None) -> Weights:
    """The layers of one model, from `work` if they are there."""
    config = prepared.config.model_dump(mode="json", exclude={"workers", "target"})
    key = json.dumps([config, prepared.dataset.name, host.spec.name, number, starts], sort_keys=True)
    path = work / "models" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors" if work else None
    if path is not None and path.exists():
        return cast(Weights, safetensors.torch.load_file(path))
    layers = _train(host, number, starts, prepared)
    if path is not None:
        write_atomically(path, safetensors.torch.save(layers))
    return layers


def _train(host: SiteHost, number: int, starts: Starts, prepared: Prepared) -> dict[str, Tensor]:
    """Trains one model and returns its layers by stage."""
    plan, net = prepared.plan, base_network(prepared)[0]
    rng = Rng.of(plan.seed, "population", host.spec.name, number)
    if starts == "random":
        other = prepared.config.model_copy(update={"seed": rng.child("start").seed() % 2**31})
        net, _ = base_network(dataclasses.replace(prepared, config=other))
    with isolated_randomness(rng), fixed_threads(plan.threads):
        site = cast(Labelled, host.view(Labelled, 1))
        trained = averaging.train.run(site, model=weights_of(net), rng=rng)
    return {stage: trained.model[name].contiguous() for stage, name in layers_of(net).items()}


def _pairwise(vectors: Tensor) -> Tensor:
    # The shortcut through dot products loses digits where models are close.
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
