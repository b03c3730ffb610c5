"""A worker process: reads requests from its standard input, answers on its standard output."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedshift.data import open_dataset
from fedshift.federation import codec
from fedshift.federation.engines.workers import read_frame, write_frame
from fedshift.federation.plan import Plan
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import Request, answer
from fedshift.federation.survey import answer_survey
from fedshift.machine import keep_freed_memory


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    # Anything a library prints must not end up between the frames.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = sys.stdin.buffer
    # By name: the federation must not import methods, but the process that runs them has to know their steps.
    importlib.import_module("fedshift.methods")
    hosts: dict[str, Callable[[Request], bytes]] = {}
    try:
        while True:
            head = json.loads(read_frame(requests))
            if "setup" in head:
                hosts = _hosts(head["setup"])
                continue
            request = Request(body=read_frame(requests), **head)
            write_frame(replies, hosts[request.site](request))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _hosts(setup: Mapping[str, Any]) -> dict[str, Callable[[Request], bytes]]:
    """Site -> what answers for it. Before there is a plan, a site can only say what it has."""
    specs = codec.restore(tuple[SiteSpec, ...], setup["specs"])
    if setup["plan"] is None:
        return {spec.name: partial(answer_survey, spec) for spec in specs}
    plan = codec.restore(Plan, setup["plan"])
    return {spec.name: partial(answer, SiteHost(spec, plan, open_dataset)) for spec in specs}


def _end_with_parent() -> None:
    """A killed parent closes the pipe, but a step that is under way would not notice for as long as it takes."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
