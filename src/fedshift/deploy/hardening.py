"""What a server and a site allow. NVFlare's own kits let jobs bring code and let administrators run shell commands;
these do not, whatever the kit that arrived says: a site writes its rules itself, each time it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedshift.federation.engines.nvflare.job import BRIDGE, DOOR

_NOTHING = dict.fromkeys(
    (
        "submit_job",
        "clone_job",
        "manage_job",
        "download_job",
        "operate",
        "shell_commands",
        "byoc",
        "server-predeployed-flwr",
    ),
    "none",
)

AUTHORIZATION = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": _NOTHING | {"view": "any"},
        "org_admin": _NOTHING | {"view": "any"},
        # The coordinator: its runs are jobs. It may neither send code nor look around on a machine.
        "lead": _NOTHING | {"submit_job": "any", "manage_job": "n:submitter", "view": "any"},
        "member": _NOTHING | {"view": "any"},
    },
}


TRANSFERS = {
    "streaming_window_size": 2 * 2**20,
    "streaming_chunk_size": 256 * 2**10,
    "streaming_ack_interval": 512 * 2**10,
    "streaming_ack_wait": 3600.0,
    "streaming_ack_progress_timeout": 600.0,
    "streaming_read_timeout": 600.0,
}
"""How models cross a slow line. A sign of life waits behind whatever is under way of a model: with NVFlare's own 64 MB,
a site on a line of 10 Mbit/s would be taken for lost. Two MB still fill a line of 80 Mbit/s with answers after 200 ms.
"""


def harden_site(kit: Path) -> None:
    """Of all classes only the site's half of a run; no log leaves, no graphics card is given away."""
    resources = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [DOOR],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [
            _component(
                "resource_manager",
                "resource_managers.gpu_resource_manager.GPUResourceManager",
                num_of_gpus=0,
                mem_per_gpu_in_GiB=0,
            ),
            _component("resource_consumer", "resource_consumers.gpu_resource_consumer.GPUResourceConsumer"),
            _component("process_launcher", "job_launcher.client_process_launcher.ClientProcessJobLauncher"),
        ],
    }
    _write(kit, resources)


def harden_server(kit: Path, lost_after: int) -> None:
    """The server's half of a run is the only class; jobs are stored in the kit, not in a shared temporary folder."""
    storage = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    resources = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [BRIDGE],
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 100,
                "heart_beat_timeout": lost_after,
                "download_job_url": "",
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {"path": storage, "args": {"root_dir": str(kit / "storage" / "snapshots"), "uri_root": "/"}},
            },
        },
        "components": [
            _component("job_scheduler", "job_schedulers.job_scheduler.DefaultJobScheduler", max_jobs=4),
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": {"uri_root": str(kit / "storage" / "jobs"), "job_store_id": "job_store"},
            },
            {"id": "job_store", "path": storage},
            _component("process_launcher", "job_launcher.server_process_launcher.ServerProcessJobLauncher"),
        ],
    }
    _write(kit, resources)


def _component(name: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "path": f"nvflare.app_common.{path}", "args": arguments}


def _write(kit: Path, resources: dict[str, Any]) -> None:
    local = kit / "local"
    local.mkdir(exist_ok=True)
    (local / "authorization.json").write_text(json.dumps(AUTHORIZATION, indent=2))
    (local / "resources.json").write_text(json.dumps(resources, indent=2))
    (local / "comm_config.json").write_text(json.dumps(TRANSFERS, indent=2))
    # NVFlare falls back to these where the ones above are missing.
    for default in ("authorization.json.default", "resources.json.default", "privacy.json.sample"):
        (local / default).unlink(missing_ok=True)
