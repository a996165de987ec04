"""`autoprec export`: a profile as settings of tools that it cannot be attached to."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_EXAMPLES = """\
examples:
  autoprec export model.profile.yaml --to deepspeed > ds_config.json
  autoprec export model.profile.yaml --to transformers > arguments.json
  env $(autoprec export model.profile.yaml --to env) accelerate launch train.py

What has no setting there is told on stderr. Lightning, accelerate and Hugging Face's Trainer take
the whole profile: see docs/trainers.md.
"""


def add_parser(subparsers: Any) -> None:
    """Add the `export` subcommand."""
    from autoprec.core.export import TARGETS

    parser = subparsers.add_parser(
        "export",
        help="print a profile as settings of another tool",
        description="Print what of a profile another tool has settings for.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("profile", type=Path, metavar="PROFILE.yaml")
    parser.add_argument("--to", required=True, choices=tuple(TARGETS), help="the tool")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings, and on stderr what is left out."""
    from autoprec.core.export import export
    from autoprec.profiles import load_profile

    text, left = export(load_profile(arguments.profile).recipe, arguments.to)
    print(text, end="")
    if left:
        print(f"autoprec: {arguments.to} has no setting for {'; '.join(left)}", file=sys.stderr)
    return 0
