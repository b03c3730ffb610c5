"""KD3A on tiny data, opened up for looking inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.federation.federation import Federation, Replies
from fedshift.methods.kd3a.kd3a import KD3A, State, Trained
from fedshift.methods.kd3a.keys import Hyper
from fedshift.methods.kd3a.target import hear
from fedshift.methods.local import plain_network, weights_of
from fedshift.runs import planning
from fedshift.runs.config import make_config

SITES = ("amber", "blue", "coral")
Edit = Callable[[str, Trained], Trained | None]


def settings(data: Path, keys: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    common = {"method": "kd3a", "data_dir": data, "target": "dim", "arch": "digits-copa", "rounds": 3, "batch_size": 16}
    return {**common, "lr": 0.02, "workers": 0, "train_per_site": 36, "kd3a": keys or {}, **changes}


def opened(
    data: Path, folder: Path, keys: dict[str, Any] | None = None, **changes: Any
) -> tuple[KD3A, State, Federation]:
    """The method before round 1, and its federation."""
    prepared = planning.prepare(make_config(settings(data, keys, **changes)))
    fed = planning.open_federation(prepared, folder, debug=True)
    method = KD3A(Hyper(**prepared.plan.hyper))
    state = method.init(planning.base_network(prepared)[0], fed)
    fed.begin(1)
    return method, state, fed


def notes(fed: Federation, name: str) -> dict[str, float]:
    return {note.site: note.value for note in fed.notes if note.name == name}


def overhear(fed: Federation, edit: Edit | None = None) -> list[dict[str, Trained]]:
    """What sites answer, after `edit` (None: no answer), one dictionary a question."""
    ask, heard = fed.ask, []

    def edited(sites: Any, step: Any, **payload: Any) -> Replies[Any]:
        replies, real = Replies(step), ask(sites, step, **payload)
        for site, release in real:
            new = edit(site, release) if edit else release
            if new is not None:
                replies.add(site, new, 1)
        heard.append(dict(replies))
        return replies

    fed.ask = edited  # type: ignore[method-assign, assignment]
    return heard


def same(a: Any, b: Any, atol: float = 0.0) -> bool:
    return set(a) == set(b) and all(torch.allclose(a[k].double(), b[k].double(), rtol=0, atol=atol) for k in a)


def teachers_of(fed: Federation, *seeds: int) -> dict[str, dict[str, Tensor]]:
    """Nets whose head is another one each, by site."""
    found = {}
    for site, seed in zip(SITES, seeds, strict=False):
        found[site] = weights_of(plain_network(fed.plan))
        drawn = torch.Generator().manual_seed(seed)
        found[site]["head.weight"] = torch.randn(found[site]["head.weight"].shape, generator=drawn)
    return found


def listen(
    fed: Federation, models: dict[str, dict[str, Tensor]], mode: str = "eval", distance: str | None = None
) -> Any:
    return fed.at_home(
        hear,
        teachers=tuple(models),
        model_of=models.__getitem__,
        samples=torch.arange(20),
        mode=mode,
        distance=distance,
    )
