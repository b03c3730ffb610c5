"""A worker process of the in-process engine: reads requests from its standard input, answers on its standard output."""

from __future__ import annotations

import importlib
import json
import os
import sys

from fedshift.data import open_dataset
from fedshift.federation import codec
from fedshift.federation.engines.inprocess import read_frame, write_frame
from fedshift.federation.plan import Plan
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import Request, answer
from fedshift.memory import keep_freed_memory


def main() -> None:
    keep_freed_memory()
    # Anything a library prints must not end up between the frames.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = sys.stdin.buffer
    # By name: the federation must not import methods, but the process that runs them has to know their steps.
    importlib.import_module("fedshift.methods")
    try:
        setup = json.loads(read_frame(requests))
        plan = codec.restore(Plan, setup["plan"])
        specs = codec.restore(tuple[SiteSpec, ...], setup["specs"])
        hosts = {spec.name: SiteHost(spec, plan, open_dataset) for spec in specs}
        while True:
            head = json.loads(read_frame(requests))
            request = Request(body=read_frame(requests), **head)
            write_frame(replies, answer(hosts[request.site], request))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
