"""A process that has imported everything and forks for each training: `python -m fedshift.cli.starter`.

To import torch and what its first optimizer wants takes longer than many a small training. On standard input comes one
JSON object a line (`arguments` of `fedshift`, `log`); on standard output goes the exit code, when that training ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys


def main() -> None:
    import_everything()
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(wanted["arguments"], wanted["log"])
        print(_wait_for(child), flush=True)


def _wait_for(child: int) -> int:
    """Its exit code. Who asked for it may be killed meanwhile, and with it the wish for what is being trained."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # Nothing is asked before the last answer: something to read is the end of standard input.
        if select.select([sys.stdin], [], [], 0.1)[0]:
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            sys.exit(1)


def import_everything() -> None:
    """What a training imports. Nothing is computed here: threads that torch starts would not survive a fork."""
    import torch

    import fedshift.cli.app
    import fedshift.cli.show
    import fedshift.runs.api
    import fedshift.runs.trial  # noqa: F401
    from fedshift.methods import METHODS, find_method

    for name in METHODS:
        find_method(name)
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=1.0)  # the first one imports half of torch


def _become(arguments: list[str], log: str) -> None:
    """Goes on as `fedshift ARGUMENTS`, saying everything into `log`."""
    with open(log, "wb") as said, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.argv = ["fedshift", *arguments]
    from fedshift.cli import main as fedshift

    fedshift()
    sys.exit(0)


if __name__ == "__main__":
    main()
