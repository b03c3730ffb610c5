from __future__ import annotations

from pathlib import Path

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
