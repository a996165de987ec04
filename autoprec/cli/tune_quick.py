"""`autoprec tune --quick`: the fastest recipe so far, in half a minute and checked by nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autoprec.cli.stop_signals import stop_signals_interrupt
from autoprec.errors import Interrupted, UsageError

#: Within so many seconds a small model has its answer.
_SECONDS = 30.0


def run(arguments: argparse.Namespace, options: Any) -> int:
    """Search for seconds, print the answer on stdout, and return the exit code."""
    from autoprec.api import answer_quickly
    from autoprec.reporting.tune import Quiet, Terminal

    if options.output is not None or arguments.report is not None or arguments.json:
        raise UsageError("--quick writes no profile; omit --output, --report and --json")
    listener = Quiet() if arguments.quiet else Terminal(Path(), limit=_SECONDS)
    with stop_signals_interrupt(), listener:
        try:
            said = answer_quickly(
                arguments.task, device=arguments.device, options=options, listener=listener
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted; finished trials are kept") from None
    print(said)
    print(
        "no profile was written, only the trials are kept: the same command without --quick goes "
        "on from them, then races the fastest recipes and proves the winner"
    )
    return 0
