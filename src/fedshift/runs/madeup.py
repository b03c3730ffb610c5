"""Data made of noise, in memory: for counting what a method does, never for learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedshift.data.domain import Dataset, Domain, Split, Task
from fedshift.rng import Rng


def made_up_dataset(
    task: Task, classes: Sequence[str], domains: Sequence[str], input_shape: Sequence[int], samples: int
) -> Dataset:
    """`samples` training samples a domain and two each for validation and test, all labelled."""
    shape = tuple(input_shape)

    def split(domain: str, name: str, count: int) -> Split:
        numbers = Rng.of(0, "made-up", domain, name).numpy()
        labels = np.arange(count, dtype=np.int64) % len(classes)
        if len(shape) == 1:
            return Split(numbers.normal(size=(count, *shape)).astype(np.float32), labels)
        images = numbers.integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
        if task == "segmentation":
            masks = numbers.integers(0, len(classes), (count, *shape[1:]), dtype=np.uint8)
            return Split(images, masks)
        return Split(images, labels)

    def load(domain: str) -> Domain:
        return Domain(domain, split(domain, "train", samples), split(domain, "val", 2), split(domain, "test", 2))

    columns = tuple(f"column{number}" for number in range(shape[0])) if len(shape) == 1 else ()
    return Dataset("made-up", task, tuple(classes), tuple(domains), shape, load, columns=columns)
