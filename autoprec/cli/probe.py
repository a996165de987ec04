"""`autoprec probe`: what is this device, what is it good at, and why."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

_DESCRIPTION = """\
Show every device that can train here: what it is, which dtypes its hardware supports and how that
is known, the recommended precision policy and why, what was refused and why.
"""

_EXAMPLES = """\
examples:
  autoprec probe                     a table for every device
  autoprec probe --measure           time matrix products per dtype as well (some seconds)
  autoprec probe --device cuda:0     one device only
  autoprec probe --device a100       what the catalogue knows of a device that is not here
  autoprec probe --json | jq '.devices[0].proposal'
"""


def add_parser(subparsers: Any) -> None:
    """Add the `probe` subcommand."""
    parser = subparsers.add_parser(
        "probe",
        help="show the devices here, what they are good at, and why",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time matrix products per dtype in a child process of the installed framework",
    )
    parser.add_argument(
        "--device",
        metavar="KIND[:INDEX]|NAME",
        help="only this device: cpu, cuda, rocm, xpu, mps or tpu, and which of several; or one "
        "that need not be here, by name: h100, tpu v5e, m4 max",
    )


def run(arguments: argparse.Namespace) -> int:
    """Probe, print, and return the exit code."""
    from autoprec.api import probe
    from autoprec.core.codec import to_plain

    result = probe(
        measure=arguments.measure,
        device=arguments.device,
        on_wait=lambda text: print(text, file=sys.stderr),
    )
    if arguments.json:
        json.dump(to_plain(result), sys.stdout, indent=2)
        print()
        return 0
    from autoprec.reporting.probe import print_probe

    print_probe(result)
    return 0
