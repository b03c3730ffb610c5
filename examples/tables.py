"""Tables: one CSV file per site. Hospitals measure the same things with devices that are set differently.

python examples/tables.py
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

import fedshift
from fedshift.runs.predict import predict_files

SHIFTS = {"north": 0.0, "south": 0.4, "west": -0.4, "harbour": 0.8}
COLUMNS = ("age", "pressure", "glucose", "outcome")


def patients(count: int, shift: float, rng: np.random.Generator) -> list[list[str]]:
    """Rows of age, blood pressure, glucose and outcome. One cell in twenty is missing, which is allowed."""
    age, pressure, glucose = rng.normal(0, 1, (3, count))
    ill = age + 1.5 * glucose - pressure + rng.normal(0, 0.3, count) > 0
    measured = np.stack([50 + 15 * age, 130 + 20 * (pressure + shift), 6 + 2 * (glucose + shift)], axis=1)
    rows = [[f"{value:.2f}" if rng.random() > 0.05 else "?" for value in row] for row in measured]
    return [[*row, "ill" if outcome else "well"] for row, outcome in zip(rows, ill, strict=True)]


def write_table(path: Path, rows: list[list[str]], columns: tuple[str, ...] = COLUMNS) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def main() -> None:
    rng = np.random.default_rng(0)
    folder = Path(tempfile.mkdtemp(prefix="fedshift-example-"))
    (folder / "patients").mkdir()
    for site, shift in SHIFTS.items():
        write_table(folder / "patients" / f"{site}.csv", patients(200, shift, rng))

    data = {"data_dir": folder / "patients", "label_column": "outcome", "target": "harbour"}
    runs = {
        method: fedshift.fit(method, **data, out=folder / method, rounds=10, batch_size=16, lr=0.05)
        for method in ("fedavg", "single-site")
    }

    # New patients come without an outcome.
    write_table(folder / "new.csv", [row[:-1] for row in patients(5, 0.8, rng)], COLUMNS[:-1])
    predict_files(runs["fedavg"].path, folder / "new.csv", folder / "predictions.csv")
    print((folder / "predictions.csv").read_text())

    print(f"{'method':<14}{'accuracy at harbour':>20}")
    for method, run in runs.items():
        print(f"{method:<14}{run.results['accuracy']['last']:>20.1%}")


if __name__ == "__main__":
    main()
