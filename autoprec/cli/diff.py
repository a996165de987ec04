"""`autoprec diff`: what differs between two profiles."""

from __future__ import annotations

import argparse
from typing import Any

_EXAMPLES = """\
examples:
  autoprec diff a100.profile.yaml h100.profile.yaml
  autoprec diff old.profile.yaml new.profile.yaml --json

exit codes: 0 both have the same recipe, 1 the recipes differ, 2 not a profile
"""

SUBJECTS = ("recipe", "task", "device", "software", "claims")


def add_parser(subparsers: Any) -> None:
    """Add the `diff` subcommand."""
    parser = subparsers.add_parser(
        "diff",
        help="say what differs between two profiles",
        description="Compare the recipes of two profiles, what they hold for, and their claims.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("first", metavar="A", help="a profile file")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences; the exit code says whether the recipes differ."""
    from autoprec.cli.json_output import print_json
    from autoprec.core.codec import to_plain
    from autoprec.core.profile.diff import compare_profiles
    from autoprec.profiles import load_profile
    from autoprec.reporting.text import printable

    comparison = compare_profiles(load_profile(arguments.first), load_profile(arguments.second))
    if arguments.json:
        print_json({"same_recipe": comparison.same_recipe, **to_plain(comparison)})
        return 0 if comparison.same_recipe else 1
    print("the same recipe" if comparison.same_recipe else "different recipes")
    for subject in SUBJECTS:
        differences = getattr(comparison, subject)
        if differences:
            print(f"{subject}:")
        for each in differences:
            print(printable(f"  {each.key}: {_shown(each.first)} -> {_shown(each.second)}"))
    return 0 if comparison.same_recipe else 1


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
