"""The job that is submitted: names of two installed classes and JSON. It never carries code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

JOB = "fedshift"
TASK = "fedshift"
BRIDGE = "fedshift.federation.engines.nvflare.controller.Bridge"
DOOR = "fedshift.federation.engines.nvflare.executor.SiteDoor"

_TASK_INTERVAL = 0.05
"""Seconds after which an idle site asks again; NVFlare's own value of 2 would be added to every question."""


def write_job(folder: Path, sites: Sequence[str], address: str) -> Path:
    """The job's folder below `folder`. `address` is the local socket at which the run waits for its bridge."""
    server = {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": _TASK_INTERVAL},
        # A site whose connection the server has given up is lost to the job soon after, not a minute and a half later.
        "dead_client_grace_period": 1.0,
        "dead_client_check_lead_time": 1.0,
        "workflows": [{"id": "bridge", "path": BRIDGE, "args": {"address": address}}],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": [TASK], "executor": {"path": DOOR, "args": {}}}],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    meta = {
        "name": JOB,
        "resource_spec": {},
        "min_clients": 1,
        "mandatory_clients": [],
        "deploy_map": {"app": ["server", *sites]},
    }
    job = folder / JOB
    config = job / "app" / "config"
    config.mkdir(parents=True)
    (job / "meta.json").write_text(json.dumps(meta, indent=2))
    (config / "config_fed_server.json").write_text(json.dumps(server, indent=2))
    (config / "config_fed_client.json").write_text(json.dumps(client, indent=2))
    return job
