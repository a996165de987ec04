"""`autoprec check`: whether a profile fits this device and software, and if not, why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autoprec.core.recipe_words import name_recipe
from autoprec.errors import ProfileMismatch

_EXAMPLES = """\
examples:
  autoprec check model.profile.yaml
  autoprec check model.profile.yaml --device cuda:1 --json

exit codes: 0 it fits (possibly with warnings, or inconclusive: both are said),
2 not a profile, 4 it does not fit
"""


def add_parser(subparsers: Any) -> None:
    """Add the `check` subcommand."""
    parser = subparsers.add_parser(
        "check",
        help="tell whether a profile fits this device and the installed software",
        description="Compare a profile with this device and the installed software.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("profile", metavar="PROFILE", help="the profile file")
    parser.add_argument("--device", metavar="KIND[:INDEX]", help="the device to compare with")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check, print, and return the exit code."""
    from autoprec.api import check_profile, load_profile
    from autoprec.cli.json_output import print_json
    from autoprec.core.codec import to_plain

    profile = load_profile(arguments.profile)
    fit = check_profile(
        profile, device=arguments.device, on_wait=lambda text: print(text, file=sys.stderr)
    )
    if arguments.json:
        print_json({"matches": fit.matches, **to_plain(fit)})
    if not fit.matches:
        instead = f"; until then {fit.instead}" if fit.instead else ""
        raise ProfileMismatch(
            f"{arguments.profile} does not fit: {'; '.join(fit.problems)}. Run "
            f"`{profile.task.tune_command()}` here{instead}"
        )
    for warning in fit.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not arguments.json:
        what = name_recipe(profile.recipe)
        if fit.inconclusive:
            what = f"its tuning was inconclusive: {what}, because {fit.inconclusive}"
        print(f"{arguments.profile} fits{', but ' if fit.inconclusive else ': '}{what}")
        for refusal in profile.evidence.refusals:
            print(f"  {refusal.candidate} refused: {refusal.reason}")
    return 0
