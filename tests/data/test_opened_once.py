from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedshift.data import registry
from fedshift.data.domain import Dataset, Domain, Split


def _dataset(loads: Counter[str], folder: Path | None) -> Dataset:
    def load(name: str) -> Domain:
        loads[name] += 1
        array = np.zeros((2, 3), dtype=np.float32)
        if folder is not None:
            np.save(folder / f"{name}.npy", array)
            array = np.load(folder / f"{name}.npy", mmap_mode="r")
        return Domain(name, Split(array, None), Split(array, None), Split(array, None))

    return registry.opened_once(Dataset("d", "classification", ("0", "1"), tuple("abcd"), (3,), load))


def test_data_in_memory_are_read_once() -> None:
    loads: Counter[str] = Counter()
    dataset = _dataset(loads, None)
    for _ in range(2):
        for name in dataset.domains:
            dataset.load(name)
    assert loads == dict.fromkeys("abcd", 1)


def test_of_mapped_domains_only_as_many_stay_open_as_files_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_most_open_files", lambda: 6)  # two domains of three arrays
    loads: Counter[str] = Counter()
    dataset = _dataset(loads, tmp_path)
    assert dataset.load("a") is dataset.load("a")
    dataset.load("b")
    dataset.load("a")
    dataset.load("c")  # lets go of b, which was not asked for longest
    dataset.load("a")
    dataset.load("b")
    assert loads == {"a": 1, "b": 2, "c": 1}
