"""A worker process that is a new interpreter: reads requests from its standard input, answers on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from fedshift.data import open_dataset
from fedshift.data.registry import opened_once
from fedshift.federation import codec
from fedshift.federation.engines.inprocess import Hosts
from fedshift.federation.engines.workers import end_with_parent, question_head, serve
from fedshift.federation.handshake import introduce
from fedshift.federation.plan import Plan
from fedshift.federation.secure import offer, reveal
from fedshift.federation.site import SiteSpec
from fedshift.federation.step import Outcome, Request, answer, pack_answer
from fedshift.federation.survey import answer_survey
from fedshift.machine import keep_freed_memory
from fedshift.methods import find_method
from fedshift.methods.calibration import sureness
from fedshift.methods.evaluation import score
from fedshift.methods.probe import probe
from fedshift.methods.statistics import measure
from fedshift.nn.archs import find_arch
from fedshift.registry import allow_import, allow_only, import_module


def main() -> None:
    end_with_parent(os.getppid())
    keep_freed_memory()
    # Anything a library prints must not end up between the frames.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    hosts: dict[str, Callable[[Request], bytes]] = {}

    def handle(head: Mapping[str, Any]) -> Callable[[bytes], bytes] | None:
        if "setup" in head:
            hosts.clear()
            hosts.update(_hosts(head["setup"]))
            return None
        return lambda body: _answer(hosts, head, body)

    serve(sys.stdin.buffer, replies, handle)


def _answer(hosts: Mapping[str, Callable[[Request], bytes]], head: Mapping[str, Any], body: bytes) -> bytes:
    """The answer of the site that is asked. A question for none of these is refused by the first."""
    respond = hosts.get(str(head.get("site"))) or next(iter(hosts.values()))
    try:
        return respond(Request(body=body, **question_head(head)))
    except ValueError:
        return respond(Request("", "", 0, "", body))


def _hosts(setup: Mapping[str, Any]) -> dict[str, Callable[[Request], bytes]]:
    """Site -> what answers for it. Before there is a plan, a site can only say what it has."""
    specs = codec.restore(tuple[SiteSpec, ...], setup["specs"])
    if setup["plan"] is None:
        return {spec.name: partial(answer_survey, spec) for spec in specs}
    steps: frozenset[str] | None = None
    try:
        plan = codec.restore(Plan, setup["plan"])
        if "imports" in setup:
            # On the user's own machine: the command that started the run named these modules.
            for module in setup["imports"]:
                allow_import(module)
                import_module(module)
        else:
            # A coordinator elsewhere names a method: only what this site's own policy lists may be imported for it.
            allow_only([module for spec in specs for module in spec.policy.imports])
        for spec in specs:
            spec.policy.check_plan(plan)  # Before anything is imported for it.
        method = find_method(plan.method)  # Its steps are known from here on.
        find_arch(plan.model.arch)
        if "imports" not in setup:
            steps = frozenset(
                step.name for step in (*method.steps, introduce, probe, score, sureness, measure, offer, reveal)
            )
    except Exception as error:
        return {spec.name: partial(_refuse, spec, error) for spec in specs}
    # Sites of one data set, as on the user's own machine, share it: it is opened once in this process.
    hosts = Hosts(specs, plan, cache(lambda source: opened_once(open_dataset(source))), steps)
    return {spec.name: partial(_answer_of, hosts, spec.name) for spec in specs}


def _answer_of(hosts: Hosts, site: str, request: Request) -> bytes:
    return answer(hosts[site], request)


def _refuse(spec: SiteSpec, error: Exception, request: Request) -> bytes:
    """The answer of a site that cannot take part: the code of the error; its text stays in the site's own log."""

    def work() -> Outcome:
        raise error

    return pack_answer(spec, request, work)


if __name__ == "__main__":
    main()
