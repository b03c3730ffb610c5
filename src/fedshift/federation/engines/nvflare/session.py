"""The coordinator's line to its server: who is connected, submit a job, end it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedshift.errors import FedshiftError, InputError, SiteError

try:
    from nvflare.fuel.flare_api.api_spec import AuthorizationError, NoConnection, SessionClosed
    from nvflare.fuel.flare_api.flare_api import Session, SessionExpired, new_secure_session
except ImportError as error:
    raise InputError("engine-missing", 'engine nvflare is not installed: pip install "fedshift[nvflare]"') from error

T = TypeVar("T")

_TRIES = 3
_ENDED = ("FINISHED", "FAILED", "ABORTED", "ABANDONED")


@dataclass(frozen=True)
class Online:
    """A site that is connected, and when its server last heard from it (seconds since the epoch)."""

    name: str
    seen: float


class Server:
    """An authenticated session, as the user of an admin kit. Close it when done."""

    def __init__(self, admin_kit: Path, user: str, timeout: float = 15.0) -> None:
        if not logging.getLogger().handlers:
            # Or Python prints what NVFlare logs about every lost connection to the user's terminal.
            logging.getLogger().addHandler(logging.NullHandler())
        self._kit = admin_kit
        self._open: Callable[[], Session] = lambda: new_secure_session(user, str(admin_kit), timeout=timeout)
        self._session = self._connected()

    def _connected(self) -> Session:
        """NVFlare gives a busy server two seconds to answer a login: as long as it listens, it is asked again."""
        problem = "nobody listens at its address"
        for _ in range(_TRIES):
            if not self._listens():
                break
            try:
                with _quiet():
                    return self._open()
            except Exception as error:
                problem = type(error).__name__
        raise SiteError(
            "server-offline",
            f"the coordinator's server does not answer ({problem}):"
            " start it with `fedshift coordinator start`, or look at its log",
        )

    def _listens(self) -> bool:
        try:
            address = json.loads((self._kit / "startup" / "fed_admin.json").read_text())["admin"]
            with socket.create_connection((address["host"], address["port"]), timeout=5):
                return True
        except (OSError, ValueError, KeyError):
            return False

    def online(self) -> list[Online]:
        clients = self._ask(lambda session: session.get_connected_client_list())
        return sorted((Online(c.name, float(c.last_connect_time)) for c in clients), key=lambda site: site.name)

    def jobs(self) -> list[str]:
        """The jobs that are running."""
        return [job.job_id for job in self._ask(lambda session: session.get_system_info()).job_info]

    def submit(self, job: Path) -> str:
        return str(self._ask(lambda session: session.submit_job(str(job))))

    def has_ended(self, job: str) -> str | None:
        """How a job ended, or None while it is waiting or running."""
        status = str(self._ask(lambda session: session.get_job_meta(job)).get("status", ""))
        return status if status.startswith(_ENDED) else None

    def abort(self, job: str) -> None:
        self._ask(lambda session: session.abort_job(job))

    def close(self) -> None:
        with contextlib.suppress(Exception), _quiet():
            self._session.close()

    def _ask(self, command: Callable[[Any], T]) -> T:
        try:
            with _quiet():
                try:
                    return command(self._session)
                except (SessionClosed, SessionExpired, NoConnection):
                    # The server ends sessions that were silent for long, as that of a run is.
                    self.close()
                    self._session = self._connected()
                    return command(self._session)
        except FedshiftError:
            raise
        except AuthorizationError as error:
            raise InputError("not-allowed", "the server does not allow this to the user of this kit") from error
        except Exception as error:
            raise SiteError(
                "server-offline",
                f"the coordinator's server did not do what was asked ({type(error).__name__}: {error})",
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """NVFlare's client code prints and logs to the user's terminal; this keeps it quiet."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
