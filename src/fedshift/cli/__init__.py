"""The command line. Commands import what they need when they run, so that --help is instant."""

from __future__ import annotations

import sys
from typing import NoReturn

from fedshift.errors import FedshiftError
from fedshift.files import refuse_too_many_files


def main() -> None:
    """Runs a command. A known error is one sentence and an exit code, never a traceback."""
    from fedshift.cli.app import app

    try:
        app(standalone_mode=True)
    except FedshiftError as error:
        _tell(error)
    except OSError as error:
        try:
            refuse_too_many_files(error)
        except FedshiftError as known:
            _tell(known)
        raise


def _tell(error: FedshiftError) -> NoReturn:
    # It may quote what came from elsewhere: names of files, what a file holds.
    shown = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in error.message)
    print(f"error [{error.code}]: {shown}", file=sys.stderr)
    sys.exit(error.exit_code)
