"""`autoprec tune --plan`: what would be tried on a device, without measuring anything."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from autoprec.cli.stop_signals import stop_signals_interrupt
from autoprec.errors import Interrupted, UsageError


def run(arguments: argparse.Namespace, options: Any) -> int:
    """Print the plan on stdout, and return the exit code."""
    from autoprec.api import plan
    from autoprec.core.codec import to_plain
    from autoprec.reporting.plan import print_plan
    from autoprec.tuning.events import Event, Note

    def say(event: Event) -> None:
        if isinstance(event, Note):
            print(f"autoprec: {event.text}", file=sys.stderr)

    if options.output is not None:
        raise UsageError("--plan writes no file; omit --output")
    with stop_signals_interrupt():
        try:
            made = plan(arguments.task, device=arguments.device, options=options, listener=say)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; nothing was kept") from None
    if arguments.json:
        json.dump(to_plain(made), sys.stdout, indent=2)
        print()
    else:
        print_plan(made)
    return 0
