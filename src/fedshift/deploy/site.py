"""A site's side: is everything in order, and start."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedshift._version import __version__
from fedshift.data.domain import DataSource
from fedshift.deploy.hardening import harden_site
from fedshift.deploy.processes import python_module, supervise
from fedshift.deploy.provision import ORGANISATION
from fedshift.errors import FedshiftError, InputError, nearest
from fedshift.federation import codec
from fedshift.federation.engines.nvflare.kits import SiteKit
from fedshift.federation.engines.nvflare.settings import SiteSettings
from fedshift.federation.policy import Policy
from fedshift.federation.site import SiteSpec
from fedshift.federation.survey import look
from fedshift.methods import METHODS
from fedshift.runs.config import read_config
from fedshift.runs.planning import WORKER

_CONNECT_SECONDS = 10.0
_ALWAYS_TOLD = ("allow", "min_samples", "clip_norm", "noise")
_NOTICE_SECONDS = 10.0
"""How much longer than its limit a server may take to notice that a site is gone."""


@dataclass(frozen=True)
class Check:
    """One line of `fedshift site check`."""

    what: str
    ok: bool
    says: str


@dataclass(frozen=True)
class SiteOptions:
    """What a site's administrator gives on the command line."""

    data: Path | None
    policy: Path | None = None
    dataset: str | None = None
    label_column: str | None = None
    image_size: int | None = None
    device: str = "cpu"


def read_policy(path: Path | None) -> Policy:
    """The rules in a site's policy file; the defaults without one."""
    if path is None:
        return Policy()
    values = read_config(path)
    known = [field.name for field in dataclasses.fields(Policy)]
    for key in values:
        if key not in known:
            raise InputError("config-key", f"{path}: unknown policy key {key!r}. {nearest(str(key), known)}")
    try:
        policy = codec.restore(Policy, codec.plain(Policy()) | values, "policy")
    except FedshiftError as error:
        raise InputError("config-value", f"{path}: {error.message}") from error
    for name in policy.methods or ():
        # Methods of the modules in `imports` are not known before these are imported.
        if not policy.imports and name not in METHODS:
            raise InputError("config-value", f"{path}: methods: no method {name!r}. {nearest(name, METHODS)}")
    return policy


def _own_policy(options: SiteOptions) -> Policy:
    """The rules of the site's file, with what the command line says of its data."""
    policy = read_policy(options.policy)
    return policy if options.label_column is None else replace(policy, label_column=options.label_column)


def check_site(folder: Path, options: SiteOptions) -> list[Check]:
    """Kit, data, policy and connection, each by itself: one that fails does not hide another."""
    checks = [_checked("kit", lambda: _kit_line(folder))]
    site = SiteKit.read(folder).site if checks[0].ok else None
    if site:
        # Without a policy that can be read, the data are checked under the defaults; the next line tells of the policy.
        policy = _own_policy(options) if _checked("policy", lambda: _policy_line(options.policy)).ok else Policy()
        checks.append(_checked("data", lambda: _data_line(site, options, policy)))
    checks.append(_checked("policy", lambda: _policy_line(options.policy)))
    if site:
        checks.append(_checked("connection", lambda: _connection_line(SiteKit.read(folder))))
    return checks


def start_site(folder: Path, options: SiteOptions, tell: Callable[[str], None] = lambda words: None) -> int:
    """Runs the site until it is told to stop. What is wrong with kit, policy or data is an error before it starts;
    the coordinator may still be away: the site waits for it."""
    kit = SiteKit.read(folder)
    _kit_line(folder)
    policy = _own_policy(options)
    _data_line(kit.site, options, policy)
    harden_site(kit.folder)
    data = str(options.data.resolve()) if options.data else None
    SiteSettings(kit.site, data, WORKER, options.dataset, codec.plain(policy), options.device).write(kit.folder)
    arguments = ["secure_train=true", f"org={ORGANISATION}", f"uid={kit.site}", "config_folder=config"]
    command = python_module(
        "nvflare.private.fed.app.client.client_train",
        *("-m", str(kit.folder), "-s", "fed_client.json", "--set", *arguments, "heart_beat_interval=3"),
    )
    mark = kit.folder / "last-end"
    if (seconds := seconds_to_wait(mark, kit.lost_after, time.time())) > 0:
        tell(f"this site was here moments ago: waiting {seconds:.0f} s until the server has noticed that it went")
        time.sleep(seconds)
    mark.write_text("")
    code = supervise(command, kit.folder / "site.out")
    mark.write_text(str(time.time()))
    return code


def seconds_to_wait(mark: Path, lost_after: float, now: float) -> float:
    """A site that comes back before the server has missed it is known to the server, but not to the run: its questions
    would never be answered. `mark` holds when the site last ended; nothing, if it was killed."""
    if not mark.exists():
        return 0.0
    try:
        since = now - float(mark.read_text())
    except ValueError:
        since = 0.0
    return max(0.0, lost_after + _NOTICE_SECONDS - max(0.0, since))


def _checked(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, True, look())
    except FedshiftError as error:
        return Check(what, False, error.message)


def _kit_line(folder: Path) -> str:
    kit = SiteKit.read(folder)
    until = _valid_until(kit)
    return f"site {kit.site} of {kit.project}, fedshift {__version__}, certificate until {until:%Y-%m-%d}"


def _valid_until(kit: SiteKit) -> datetime:
    from cryptography import x509  # Comes with the engine.

    try:
        certificate = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError("deploy-kit", f"{kit.certificate} cannot be read: ask for a new kit") from error
    now = datetime.now(UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise InputError(
            "deploy-kit",
            f"the kit's certificate is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to"
            f" {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC and the clock here says {now:%Y-%m-%d %H:%M}:"
            " ask for a new kit, or set the clock",
        )
    return certificate.not_valid_after_utc


def _data_line(site: str, options: SiteOptions, policy: Policy) -> str:
    if options.data is None and options.dataset is None:
        raise InputError("data-missing", "say where the site's data is: --data DIR")
    source = DataSource(options.dataset, options.data, options.image_size, policy.label_column)
    found = look(SiteSpec(site, "held-out", source, (site,), Path(), policy, is_remote=True))
    classes = f"{len(found.classes)} classes ({', '.join(found.classes[:6])}{', ...' * (len(found.classes) > 6)})"
    return f"{found.task or 'no labels'}, {classes if found.classes else 'classes come from the others'}"


def _policy_line(path: Path | None) -> str:
    policy = read_policy(path)
    shown: dict[str, Any] = codec.plain(policy)
    usual = codec.plain(Policy())
    told = {key: value for key, value in shown.items() if key in _ALWAYS_TOLD or value != usual[key]}
    return ", ".join(f"{key} {value}" for key, value in told.items()) + ("" if path else " (defaults)")


def _connection_line(kit: SiteKit) -> str:
    """A handshake with the site's certificate: both sides have to accept each other."""
    context = ssl.create_default_context(cafile=str(kit.authority))
    context.load_cert_chain(kit.certificate, kit.key)
    where = f"{kit.host}:{kit.port}"
    try:
        with (
            socket.create_connection((kit.host, kit.port), timeout=_CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=kit.host) as line,
        ):
            line.settimeout(1.0)
            try:
                # A server that refuses the certificate says so only now; one that accepts it waits.
                if line.recv(1) == b"":
                    raise ssl.SSLError("the server closed the connection")
            except TimeoutError:
                pass
    except ssl.SSLError as error:
        raise InputError(
            "deploy-kit", f"{where} answers, but not for this kit ({error.reason or error}): is it of this project?"
        ) from error
    except OSError as error:
        raise InputError(
            "server-offline", f"{where} cannot be reached ({error.strerror or error}): firewall, or not started yet"
        ) from error
    return f"{where} accepts this site's certificate"
