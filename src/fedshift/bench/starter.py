"""A process that imports everything once and forks for each training: `python -m fedshift.bench.starter`.

Importing torch and what its first optimizer needs takes longer than many small trainings. Standard input brings one
JSON object per line (`config`, `folder`, `log`); standard output gets the exit code when that training has ended. With
`config` and `folder` as arguments, the process trains once and exits: for platforms where a fork is not safe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) == 3:
        sys.exit(train(Path(sys.argv[1]), Path(sys.argv[2])))
    import_everything()
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            _write_all_output_to(wanted["log"])
            sys.exit(train(Path(wanted["config"]), Path(wanted["folder"])))
        print(_wait_for(child), flush=True)


def import_everything() -> None:
    """Imports what a training imports. It computes nothing: threads that torch starts would not survive a fork."""
    import fedshift.runs.api
    import fedshift.runs.execute
    import fedshift.runs.progress  # noqa: F401
    from fedshift.methods import METHODS, find_method

    for name in METHODS:
        find_method(name)


def train(config: Path, folder: Path) -> int:
    """Trains to the end, resuming an unfinished run. Returns the exit code; an error is one line on standard error."""
    from fedshift.errors import STOPPED, FedshiftError
    from fedshift.runs.config import make_config, read_config
    from fedshift.runs.execute import run
    from fedshift.runs.progress import for_terminal

    try:
        run(make_config(read_config(config)), folder, resume=True, progress=for_terminal())
    except FedshiftError as error:
        print(f"error [{error.code}]: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return STOPPED
    return 0


def _write_all_output_to(log: str) -> None:
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _wait_for(child: int) -> int:
    """Returns the child's exit code. If the process that asked for the training dies first, the child is ended too."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # The next request comes only after this answer, so readable input means that standard input was closed.
        if select.select([sys.stdin], [], [], 0.1)[0]:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            sys.exit(1)


if __name__ == "__main__":
    main()
