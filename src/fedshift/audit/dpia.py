"""A draft of a data-protection impact assessment, filled with what a run says of itself. What only people can say is
left open, marked with `[...]`. It takes no side on the legal basis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.audit.ledger import LedgerAudit, audit_ledger
from fedshift.errors import InputError
from fedshift.federation.handshake import introduce
from fedshift.federation.ledger import LEDGER
from fedshift.federation.releases import SINGLE_SAMPLES, kinds
from fedshift.federation.secure import offer, reveal
from fedshift.methods import find_about, find_method
from fedshift.methods.base import About
from fedshift.methods.calibration import sureness
from fedshift.methods.evaluation import score
from fedshift.methods.probe import probe
from fedshift.methods.statistics import measure
from fedshift.runs.config import read_config
from fedshift.runs.directory import RunDirectory
from fedshift.runs.privacy import privacy_lines, read_promised
from fedshift.runs.record import read_results

FEW_SAMPLES = 128
"""Sites with fewer training samples are named: what a message shows of each sample falls with their number."""


@dataclass(frozen=True)
class Flow:
    """One field that leaves a site."""

    step: str
    field: str
    kind: str
    what: str
    to: str


def data_flows(method: str, setting: str, *, secure: bool = False, probes: bool | None = None) -> list[Flow]:
    """Everything that can leave a site under a method, from the types that the code obeys: with `secure` aggregation
    what is summed stays there, and leaves masked. `probes`: whether the head is trained first (None: it may be)."""
    about, found = find_about(method), []
    measures = setting == "multi-adapt" and not about.uses_statistics
    probes = about.aggregation != "own" if probes is None else probes
    for step in (
        introduce,
        *((offer, reveal) if secure else ()),
        *((probe,) if probes else ()),
        *find_method(method).steps,
        *((measure,) if measures else ()),
        score,
        sureness,
    ):
        for field, kind in kinds(step.release).items():
            hidden = secure and step is not reveal and field in step.release.summed
            if field not in about.unsent and not hidden:
                # Public keys are for the other sites.
                passed_on = field in step.release.passed_on or step is offer
                to = "coordinator and other sites" if passed_on else "coordinator"
                what = _PUBLIC_KEY if step is offer else kind.meaning
                found.append(Flow(step.name, field, kind.name, what, to))
    return found


_PUBLIC_KEY = "the public half of the site's key for this run, with the site's certificate where it has one"


def assessment(folder: Path) -> str:
    """The draft for a finished run, as Markdown."""
    directory = RunDirectory(folder)
    if not directory.done.exists():
        raise InputError("run-missing", f"{folder} holds no finished run: an assessment is drafted for one")
    results, config = read_results(folder), read_config(directory.config, "run-corrupt")
    about = find_about(results["method"])
    flows = _flows_of(results, config)
    ledgers = {path.parent.name: audit_ledger(path) for path in sorted(directory.sites.glob(f"*/{LEDGER}"))}
    parts = [
        f"# Data-protection impact assessment (draft): {about.name} on {results['dataset']}",
        "Filled from the run's own files. Everything in `[...]` is for people to say; nothing here is legal advice.",
        "## 1. The processing",
        _bullets(
            "Purpose: [what the model is for, and who decides on it]",
            "Responsible: [controller or joint controllers, processors, data-protection officer]",
            f"Method: {about.name} ({about.paper}); data moved: {_data_moved(about, flows)}",
            f"Network: {results['arch']}, {len(results['classes'])} classes, {results['rounds']} rounds",
            "Categories of persons and data: [patients, customers, ...; which attributes]",
            "Legal basis at each site: [...]",
        ),
        _sites_table(results),
        _simulation(results, config),
        "## 2. What leaves a site, and to whom",
        _table(
            ("step", "field", "kind", "what it is", "to"),
            [(flow.step, flow.field, flow.kind, flow.what, flow.to) for flow in flows],
        ),
        "What really left, from the sites' ledgers, whose chains were verified:" if ledgers else _NO_LEDGERS,
        _left_table(ledgers),
        "## 3. Where it is kept, and how long",
        _table(("what", "where", "until"), _KEPT),
        "## 4. Measures",
        _bullets(*_measures(results, config, about)),
        "## 5. Risks",
        _table(("risk", "what is known of this run", "assessment"), _risks(results, config)),
        "## 6. Decision",
        _bullets(
            "Necessity and proportionality: [could the purpose be reached with less?]",
            "Views of the persons concerned or their representatives: [...]",
            "Advice of the data-protection officer: [...]",
            "Decision, date, next review: [...]",
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_NO_LEDGERS = "The sites' ledgers are at the sites: ask each for `fedshift audit ledger KIT`."
_KEPT = (
    (
        "training data",
        "the site; read images may be in its cache (`fedshift doctor` says where)",
        "[the site's own rule]",
    ),
    ("state between rounds, answers of the last round, ledger, log", "the site's folder of the run", "deleted by hand"),
    (
        "keys for noise and masks, budgets, which samples were used",
        "the site's kit or folder of the run",
        "deleted by hand",
    ),
    ("what sites sent", "the coordinator's memory or temporary files", "the end of the round"),
    ("models, checkpoints, scores, metrics", "the coordinator's run directory", "`fedshift runs delete RUN`"),
    ("metrics and settings sent to trackers (`--track`)", "[the tracker's server, if one was used]", "[its own rule]"),
    (
        "samples and feature maps in report.html",
        "wherever the report is",
        "deleted by hand; `--no-features` omits them",
    ),
)


def _flows_of(results: Mapping[str, Any], config: Mapping[str, Any]) -> list[Flow]:
    secure, probes = bool(config.get("secure_aggregation")), bool(config.get("probe_epochs"))
    return data_flows(results["method"], results["setting"], secure=secure, probes=probes)


def _data_moved(about: About, flows: Sequence[Flow]) -> str:
    if about.data != "federated":
        return about.needs or about.data
    single = sorted({flow.kind for flow in flows} & set(SINGLE_SAMPLES))
    return f"no samples, but {' and '.join(single)} of single samples" if single else "none, models only"


def _is_simulated(config: Mapping[str, Any]) -> bool:
    return str(config.get("engine", "inprocess")) == "inprocess"


def _simulation(results: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    told = []
    if _is_simulated(config):
        told.append(
            "**All sites of this run were played on one machine, which read all their data.** What is said below of"
            " sites and of what leaves them is how it is between machines."
        )
    if results.get("attack"):
        told.append(f"**Bad sites were simulated for a study: {', '.join(results['attack'])}.**")
    return "\n\n".join(told)


def _measures(results: Mapping[str, Any], config: Mapping[str, Any], about: About) -> list[str]:
    policy: Mapping[str, Any] = config.get("policy") or {}
    told = ", ".join(f"{key} {value}" for key, value in policy.items()) or "defaults"
    secure = bool(config.get("secure_aggregation"))
    budgets = privacy_lines(read_promised(results))
    stay = "Raw data stay at the sites" if about.data == "federated" else "Raw data were copied as section 1 says"
    seen = (
        "on: of what is summed the coordinator saw sums over sites; losses, numbers of samples and scores of each site"
    )
    return [
        f"{stay}; only declared kinds leave them (section 2), each listed before it leaves",
        f"Policy of this run: {told}. Sites on other machines have files of their own: [attach them]",
        *(f"Differential privacy: {line}" for line in budgets or ["no budget was kept"]),
        f"Secure aggregation: {seen if secure else 'off'}",
        f"Rule for averaging: {config.get('aggregation', 'mean')}",
        f"Transport: {'none, one machine' if _is_simulated(config) else 'mutual TLS between site and coordinator'}",
        "Access to the model and the run directory: [who, how]",
    ]


def _risks(results: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    held_out = {results.get("target")} if results["setting"] == "generalize" else set()
    sizes = {site: found.get("train", 0) for site, found in results["samples"].items() if site not in held_out}
    small = [site for site, count in sizes.items() if 0 < count < FEW_SAMPLES]
    hidden = "only sums of models were seen" if config.get("secure_aggregation") else "each site's model was seen"
    single = {flow.kind for flow in _flows_of(results, config)} & set(SINGLE_SAMPLES)
    budget = "a budget was kept" if results.get("privacy") else "no bound was promised"
    return [
        (
            "samples are rebuilt from what a site sends",
            f"{hidden}; sites with fewer than {FEW_SAMPLES} training samples: {', '.join(small) or 'none'}."
            " `fedshift audit leakage` tries it on your own data",
            "[...]",
        ),
        ("somebody finds out that a sample was used", f"{budget}; all who take part know the final model", "[...]"),
        ("single samples leave", f"kinds of single samples: {', '.join(sorted(single)) or 'none'}", "[...]"),
        ("a site spoils the model", f"rule for averaging: {config.get('aggregation', 'mean')}", "[...]"),
        (
            "the model is wrong for some people",
            f"{_warned(results)}; accuracy by group of persons: [measure it where the groups are known]",
            "[...]",
        ),
    ]


def _warned(results: Mapping[str, Any]) -> str:
    """The codes: the sentences are in the model card."""
    codes = sorted({str(warning.get("code", "")) for warning in results.get("warnings", [])})
    return f"warnings of the run (in the model card): {', '.join(codes) or 'none'}"


def _sites_table(results: Mapping[str, Any]) -> str:
    parts = ("train", "val", "test")
    rows = [(site, *(f"{sizes.get(part, 0):,}" for part in parts)) for site, sizes in results["samples"].items()]
    return _table(("site", "training samples", "validation", "test"), rows)


def _left_table(ledgers: Mapping[str, LedgerAudit]) -> str:
    rows = [
        (site, kind, f"{total.releases:,}", f"{total.values:,}", f"{total.bytes:,}")
        for site, found in ledgers.items()
        for kind, total in sorted(found.kinds.items())
    ]
    return _table(("site", "kind", "times", "values", "bytes"), rows) if rows else ""


def _bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
