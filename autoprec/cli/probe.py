"""`autoprec probe`: what the devices here are, which precisions they support, and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_DESCRIPTION = """\
Show every device here that can train: what it is, which dtypes it supports and how that is known,
which precision policy is recommended and why, and which were refused and why.
"""

_EXAMPLES = """\
examples:
  autoprec probe                     a table for every device
  autoprec probe --measure           also time matrix products in each dtype (some seconds)
  autoprec probe --device cuda:0     one device only
  autoprec probe --device a100       what is known about a device that is not in this machine
  autoprec probe --json | jq '.devices[0].proposal'
"""


def add_parser(subparsers: Any) -> None:
    """Add the `probe` subcommand."""
    parser = subparsers.add_parser(
        "probe",
        help="show the devices here, which precisions they support, and why",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also time matrix products in each dtype, in a child process that uses the "
        "installed framework",
    )
    parser.add_argument(
        "--device",
        metavar="KIND[:INDEX]|NAME",
        help="show one kind of device (cpu, cuda, rocm, xpu, mps, tpu) or one device (cuda:1); or, "
        "by name, a device that need not be in this machine: h100, tpu v5e, m4 max",
    )


def run(arguments: argparse.Namespace) -> int:
    """Probe, print, and return the exit code."""
    from autoprec.api import probe
    from autoprec.cli.json_output import print_json
    from autoprec.reporting.probe import print_probe

    result = probe(
        measure=arguments.measure,
        device=arguments.device,
        on_wait=lambda text: print(text, file=sys.stderr),
    )
    if arguments.json:
        print_json(result)
    else:
        print_probe(result)
    return 0
