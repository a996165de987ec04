"""`autoprec show`: a profile on the terminal, for a person."""

from __future__ import annotations

import argparse
from typing import Any

_EXAMPLES = """\
examples:
  autoprec show model.profile.yaml
  autoprec show model.profile.yaml --json | jq .evidence.speedup
"""


def add_parser(subparsers: Any) -> None:
    """Add the `show` subcommand."""
    parser = subparsers.add_parser(
        "show",
        help="say what is in a profile",
        description="Say what a profile applies, where it holds, and what it claims.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("profile", metavar="PROFILE", help="the profile file")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the profile."""
    from autoprec.cli.json_output import print_json
    from autoprec.profiles import load_profile, to_mapping
    from autoprec.reporting.show import profile_lines

    profile = load_profile(arguments.profile)
    if arguments.json:
        print_json(to_mapping(profile))
    else:
        print("\n".join(profile_lines(profile)))
    return 0
