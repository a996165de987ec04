"""`autoprec verify`: whether what a profile claims still holds on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

CLAIM_FAILED = 5

_EXAMPLES = """\
examples:
  autoprec verify model.profile.yaml                 # the task file next to it
  autoprec verify model.profile.yaml src/model.py
  autoprec verify model.profile.yaml --json          # for CI
  autoprec verify model.profile.yaml --checkpoint last.pt   # at weights that trained for a while

Times the recipe and float32 in alternation again, and proves the first steps again. Run it after an
upgrade of a driver or a framework.

exit codes: 0 every claim holds (or is unresolved, which is said), 1 the task fails,
2 not a profile, 4 the profile does not fit this device, 5 a claim fails
"""


def add_parser(subparsers: Any) -> None:
    """Add the `verify` subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="measure and prove a profile's recipe again",
        description="Say whether the claims of a profile still hold on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", metavar="PROFILE", help="the profile file")
    parser.add_argument(
        "task",
        metavar="TASK",
        nargs="?",
        type=Path,
        help="its task file (default: the one named in it, next to it)",
    )
    parser.add_argument("--device", metavar="KIND[:INDEX]", help="the device to verify it on")
    parser.late = _add_options


def _add_options(parser: argparse.ArgumentParser) -> None:
    from autoprec.cli.settings import add_setting

    add_setting(
        parser,
        "rounds",
        "rounds of the interleaved timing; twice as many where those leave it open "
        "(default: {default})",
    )
    add_setting(
        parser,
        "checkpoint",
        "prove it from the weights in this file: those that its tuning started from, or a later "
        "checkpoint of the training",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 5 where a claim is unresolved, too"
    )
    add_setting(parser, "wait", "wait if a tuning is using the device")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print, and return the exit code."""
    from autoprec.api import verify
    from autoprec.cli.settings import settings_given
    from autoprec.core.codec import to_plain
    from autoprec.reporting.verify import Lines, claim_lines

    found = verify(
        arguments.profile,
        arguments.task,
        device=arguments.device,
        listener=Lines(),
        **settings_given(arguments),
    )
    if arguments.json:
        json.dump({"holds": found.holds, **to_plain(found)}, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(claim_lines(found)))
    unresolved = any(claim.result == "unresolved" for claim in found.claims)
    return CLAIM_FAILED if found.failed or (arguments.strict and unresolved) else 0
