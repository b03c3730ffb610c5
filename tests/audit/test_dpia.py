from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedshift
from fedshift.audit.dpia import assessment, data_flows
from fedshift.errors import FedshiftError


def test_what_leaves_is_what_the_types_say() -> None:
    flows = {(flow.step, flow.field): flow for flow in data_flows("feddg", "generalize")}
    spectra = next(flow for flow in flows.values() if flow.kind == "spectra")
    assert spectra.to == "coordinator and other sites"
    steps = {flow.step for flow in data_flows("fedavg", "generalize")}
    assert "statistics.measure" not in steps
    assert {"evaluation.score", "calibration.sureness"} <= steps, "what is counted when a run ends leaves too"
    assert "statistics.measure" in {flow.step for flow in data_flows("fedavg", "multi-adapt")}


def test_a_draft_is_filled_from_the_run_and_leaves_the_rest_open(tiny_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(FedshiftError, match="no finished run"):
        assessment(out)
    policy = {"min_samples": 2, "epsilon": 8.0, "clip_norm": 1.0, "noise": 4.0}
    keys = {"target": "dim", "rounds": 1, "batch_size": 8, "workers": 0, "arch": "digits-csac"}
    fedshift.fit(data=tiny_data, out=out, policy=policy, **keys)
    text = assessment(out)
    for wanted in (
        "| averaging.train | model | weights |",
        "| amber | weights | 1 |",
        "Differential privacy: amber, blue, coral: epsilon 8 at delta 1e-05",
        "Secure aggregation: off",
        "sites with fewer than 128 training samples: amber",
        "Legal basis at each site: [...]",
    ):
        assert wanted in text, wanted


def test_under_secure_aggregation_models_leave_masked_and_keys_go_to_other_sites() -> None:
    flows = {(flow.step, flow.field): flow for flow in data_flows("fedavg", "generalize", secure=True, probes=False)}
    assert ("averaging.train", "model") not in flows and ("probe.probe", "head") not in flows
    assert flows["secure.reveal", "numbers"].kind == "masked"
    assert flows["secure.offer", "key"].to == "coordinator and other sites"
    assert ("averaging.train", "loss") in flows


def test_everything_that_left_in_a_run_is_in_its_table(tiny_data: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"target": "dim", "rounds": 1, "batch_size": 8, "workers": 0, "arch": "digits-csac"}
    for secure in (False, True):
        out = tmp_path / str(secure)
        fedshift.fit(data=tiny_data, out=out, policy={"min_samples": 2}, secure_aggregation=secure, **keys)
        text = assessment(out)
        lines = [json.loads(line) for path in out.glob("sites/*/ledger.jsonl") for line in path.open()]
        left = {(line["step"], line["field"], line["kind"]) for line in lines if line.get("values", 0) > 0}
        assert len(left) > 5
        for step, field, kind in left:
            assert f"| {step} | {field} | {kind} |" in text, (step, field)


def test_what_is_not_so_is_not_said(tiny_data: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"target": "dim", "rounds": 1, "batch_size": 8, "workers": 0, "arch": "digits-csac"}
    policy = {"min_samples": 2}
    fedshift.fit("deepall", data=tiny_data, out=tmp_path / "pooled", policy=policy, **keys)
    pooled = assessment(tmp_path / "pooled")
    assert "Raw data stay" not in pooled and "all labelled data in one place" in pooled
    fedshift.fit("feddg", data=tiny_data, out=tmp_path / "spectra", policy=policy, attack=["noise:amber"], **keys)
    spectra = assessment(tmp_path / "spectra")
    assert "no samples, but spectra of single samples" in spectra and "models only" not in spectra
    assert "All sites of this run were played on one machine" in spectra
    assert "Bad sites were simulated for a study: noise:amber." in spectra
    assert "training samples: amber, blue, coral." in spectra, "dim trains nothing"
