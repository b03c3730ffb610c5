"""Your own arrays: NumPy arrays per site, and a network of your own, without a file on disk.

python examples/own_arrays.py
"""

from __future__ import annotations

import numpy as np
from torch import nn

import fedshift

GAINS = {"north": 1.0, "south": 0.8, "west": 0.6, "harbour": 0.7}
CLASSES = ("across", "down", "spot")


def pictures(count: int, gain: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images `(n, 16, 16, 3)` uint8 and labels `(n,)`: bars across, bars down and spots, as bright as `gain`."""
    labels = np.arange(count) % len(CLASSES)
    rows, columns = np.mgrid[0:16, 0:16]
    images = np.empty((count, 16, 16, 3), np.uint8)
    for number, label in enumerate(labels):
        phase, centre = rng.integers(0, 4), rng.uniform(5, 11, 2)
        spot = np.hypot(rows - centre[0], columns - centre[1]) < 4
        shape = ((rows + phase) % 4 < 2, (columns + phase) % 4 < 2, spot)[label]
        grey = gain * (0.2 + 0.6 * shape) + rng.normal(0, 0.15, (16, 16))
        images[number] = (255 * grey.clip(0, 1))[..., None]
    return images, labels


def small_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Any torch module that maps images `(B, 3, H, W)` with values in [0, 1] to scores `(B, classes)`."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def main() -> None:
    rng = np.random.default_rng(0)
    data = {site: pictures(150, gain, rng) for site, gain in GAINS.items()}
    print(f"{'network':<14}{'accuracy at harbour':>20}")
    for name, net in (("digits-copa", "digits-copa"), ("small_net", small_net)):
        run = fedshift.fit(
            "fedavg", data=data, classes=CLASSES, net=net, target="harbour", rounds=8, batch_size=16, lr=0.05
        )
        print(f"{name:<14}{run.results['accuracy']['last']:>20.1%}")
    images, labels = pictures(6, GAINS["harbour"], rng)
    predicted = [CLASSES[number] for number in run.predict(images)]
    print(f"predicted {predicted}, drawn {[CLASSES[number] for number in labels]}")


if __name__ == "__main__":
    main()
