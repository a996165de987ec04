"""`autoprec report`: a profile, or several, as a page to look at."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_EXAMPLES = """\
examples:
  autoprec report model.profile.yaml                 # writes model.report.html
  autoprec report model.profile.yaml -o /tmp/r.html
  autoprec report profiles/                          # compares a folder's profiles by device
  autoprec report a.profile.yaml b.profile.yaml -o both.html

The page is one file that loads nothing and runs no script: send it, or attach it to a pull request.
"""


def add_parser(subparsers: Any) -> None:
    """Add the `report` subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="write a page about a profile, or one that compares several",
        description="Write one HTML file with the charts and numbers of a profile.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "profiles", metavar="PROFILE", nargs="+", help="a profile file, several, or a folder"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.html",
        help="where to write it (default: next to the profile)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and print where it is."""
    from autoprec.api import report

    given = [Path(each) for each in arguments.profiles]
    output = arguments.output or _default_output(given)
    page = report(given[0] if len(given) == 1 else given, output=output)
    print(f"wrote {len(page.encode()) / 1000:.0f} kB:", file=sys.stderr)
    print(output)
    return 0


def _default_output(given: list[Path]) -> Path:
    """Return where the page goes: next to the profile, in the folder of several, or here."""
    from autoprec.profiles import REPORT_SUFFIX, default_report_path

    return default_report_path(given[0]) if len(given) == 1 else Path(f"profiles{REPORT_SUFFIX}")
