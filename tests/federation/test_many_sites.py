from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.errors import FedshiftError
from fedshift.federation import codec, federation, step
from fedshift.federation.engines import inprocess
from fedshift.runs import card
from fedshift.runs.api import fit

SITES = 5


@pytest.fixture
def rows() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(SITES, 40, 4)).astype(np.float32)
    return {f"s{site}": (x[site], (x[site].sum(axis=1) > 0).astype(np.int64)) for site in range(SITES)}


def test_sites_that_were_let_go_and_replies_on_disk_change_no_byte(
    rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"arch": "mlp", "policy": {"min_samples": 2}, "rounds": 2, "workers": 0}
    usual = fit("fedavg", data=rows, out=tmp_path / "usual", **keys)
    monkeypatch.setattr(inprocess, "KEPT_SITES", 2)
    monkeypatch.setattr(federation, "IN_MEMORY_REPLIES", 1)
    made: list[str] = []
    host = inprocess.SiteHost

    def counted(spec: Any, *rest: Any) -> Any:
        made.append(spec.name)
        return host(spec, *rest)

    monkeypatch.setattr(inprocess, "SiteHost", counted)
    few = fit("fedavg", data=rows, out=tmp_path / "few", **keys)
    assert few.results["model_sha256"] == usual.results["model_sha256"]
    # Introduced, trained and validated in round 1, then in round 2, and asked how sure the model is: with two kept of
    # five, each is made every time.
    assert len(made) == 6 * SITES


def test_a_model_card_sums_up_what_many_sites_sent(
    rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"arch": "mlp", "policy": {"min_samples": 2}, "rounds": 2, "workers": 0}
    fit("fedavg", data=rows, out=tmp_path / "each", **keys)
    monkeypatch.setattr(card, "_MOST_LISTED", SITES - 1)
    fit("fedavg", data=rows, out=tmp_path / "sums", **keys)

    def weights(name: str) -> list[list[str]]:
        lines = (tmp_path / name / "MODEL_CARD.md").read_text().splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| weights |" in line]

    each = weights("each")
    assert [row[:3] for row in each] == [[f"s{site}", "weights", "2"] for site in range(SITES)]
    values = sum(int(row[3].replace(",", "")) for row in each)
    assert weights("sums") == [[f"all {SITES}", "weights", str(2 * SITES), f"{values:,}"]]


def test_more_sites_than_files_may_be_open(rows: dict[str, Any], tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = tmp_path / "data"
    folder.mkdir()
    for site in range(60):
        np.savez(
            folder / f"s{site:02}.npz", images=np.full((12, 16, 16, 3), site, dtype=np.uint8), labels=np.arange(12) % 2
        )
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        run = fit(
            "fedavg", data=folder, out=tmp_path / "run", rounds=1, arch="digits-copa", workers=0,
            policy={"min_samples": 2}, evaluate_every=1,
        )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(run.results["samples"]) == 60


def test_a_site_that_changes_what_it_was_sent_changes_it_for_nobody_else() -> None:
    body = codec.pack({"model": {"weight": torch.ones(3)}, "terms": [torch.zeros(2)]})
    first = step._unpacked(body)
    first["model"]["weight"].mul_(7)
    first["terms"].append(None)
    second = step._unpacked(bytes(bytearray(body)))
    assert torch.equal(second["model"]["weight"], torch.ones(3)) and len(second["terms"]) == 1
    with pytest.raises(FedshiftError):
        step._unpacked(body[:-1])
