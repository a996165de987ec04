"""`autoprec verify`: whether what a profile claims still holds on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import UNRESOLVED, UsageError

if TYPE_CHECKING:
    from autoprec.core.profile.claims import Verification
    from autoprec.tuning.events import Event

_EXAMPLES = """\
examples:
  autoprec verify model.profile.yaml                 # the task file next to it
  autoprec verify model.profile.yaml src/model.py
  autoprec verify train.profile.yaml                 # a script, with the arguments of its tuning
  autoprec verify train.profile.yaml -- --lr 1e-3    # with others
  autoprec verify --script train.profile.yaml        # whole runs of the script itself, in turns
  autoprec verify model.profile.yaml --json          # for CI
  autoprec verify model.profile.yaml --checkpoint last.pt   # at weights that trained for a while

Times the recipe and float32 in alternation again, and compares their first steps again. Run it
after an upgrade of a driver or a framework.

exit codes: 0 every claim holds (or is unresolved, which is said), 1 the task fails,
2 not a profile, 4 the profile does not fit this device, 5 a claim fails
"""


def add_parser(subparsers: Any) -> None:
    """Add the `verify` subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="measure a profile's recipe and check it against float32 again",
        description="Say whether the claims of a profile still hold on this machine.",
        epilog=_EXAMPLES,
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
    parser.late, parser.rest = _add_options, "arguments"


def _add_options(parser: argparse.ArgumentParser) -> None:
    from autoprec.cli.settings import add_setting

    parser.set_defaults(at=None)
    parser.add_argument(
        "--script",
        action="store_true",
        help="run the whole script with the profile that it applies and with AUTOPREC=off, in "
        "turns, and compare an update's time, its loader included, and the losses",
    )
    parser.add_argument(
        "--updates", type=int, metavar="N", help="updates of each such run (default: 60)"
    )
    add_setting(
        parser,
        "rounds",
        "rounds of the interleaved timing; twice as many if those leave it open "
        "(default: {default})",
    )
    add_setting(
        parser,
        "checkpoint",
        "check it from the weights in this file: those that its tuning started from, or a later "
        "checkpoint of the training",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 5 if a claim is unresolved, too"
    )
    add_setting(parser, "at")
    add_setting(parser, "wait", "wait if a tuning is using the device")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Verify, print, and return the exit code."""
    from autoprec.api import verify, verify_script
    from autoprec.cli.json_output import print_json
    from autoprec.cli.settings import settings_given
    from autoprec.core.codec import to_plain
    from autoprec.reporting.text import printable

    own = arguments.arguments or None  # None: those of the tuning
    given = {**settings_given(arguments), "arguments": own, "listener": _show}
    left = [name for name in ("checkpoint", "wait") if name in given and arguments.script]
    if left:
        raise UsageError(f"--script runs the whole script, without `{left[0]}`: leave that out")
    if arguments.script:
        given |= {} if arguments.updates is None else {"updates": arguments.updates}
        verification = verify_script(arguments.profile, arguments.task, **given)
    else:
        given |= {"device": arguments.device, "at": arguments.at}
        verification = verify(arguments.profile, arguments.task, **given)
    if arguments.json:
        print_json({"holds": verification.holds, **to_plain(verification)})
    else:
        print(printable("\n".join(_claim_lines(verification))))
    unresolved = any(claim.result == "unresolved" for claim in verification.claims)
    return UNRESOLVED if verification.failed or (arguments.strict and unresolved) else 0


def _show(event: Event) -> None:
    """Print a stage or a note as a line on stderr."""
    from autoprec.reporting.text import note_text, printable, stage_text
    from autoprec.tuning.events import Note, Stage

    match event:
        case Stage():
            text = stage_text(event.name, event.detail)
        case Note():
            text = note_text(event)
        case _:
            return
    print(printable(text), file=sys.stderr, flush=True)


def _claim_lines(verification: Verification) -> list[str]:
    """Return a line for each claim, and one that says what follows."""
    lines = [
        f"{each.name}: {each.result}: {each.stated} was stated, found: {each.found}"
        for each in verification.claims
    ]
    if verification.failed:
        names = " and ".join(each.name for each in verification.failed)
        return [*lines, f"the profile's claim of {names} fails: tune again on this machine"]
    if any(each.result == "unresolved" for each in verification.claims):
        return [
            *lines,
            "no claim fails, but not all could be decided: repeat it on an idle machine",
        ]
    return [*lines, "every claim holds"]
