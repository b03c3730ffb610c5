from __future__ import annotations

from pathlib import Path

import torch

from fedshift.federation.store import SiteStore


def test_the_newest_version_is_read_and_rewinding_forgets_later_ones(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    assert store.load("model") is None
    for round in (1, 2, 3):
        store.save("model", {"w": torch.tensor([float(round)])}, round)
    assert float(store.load("model")["w"]) == 3
    store.rewind(1)
    assert float(store.load("model")["w"]) == 1
    store.rewind(0)
    assert store.load("model") is None


def test_old_versions_are_dropped_but_the_last_three_stay(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    for round in range(1, 13):
        store.save("model", {"w": torch.tensor([float(round)])}, round)
    assert len(list(tmp_path.iterdir())) == 3
    store.rewind(10)
    assert float(store.load("model")["w"]) == 10


def test_names_do_not_mix(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    store.save("model", {"a": 1}, 1)
    store.save("model-head", {"a": 2}, 5)
    assert store.load("model") == {"a": 1} and store.load("model-head") == {"a": 2}
