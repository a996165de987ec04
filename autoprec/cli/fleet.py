"""`autoprec fleet`: what the profiles of several device types say together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autoprec.errors import UsageError

_DESCRIPTION = """\
Show the device types that a folder of profiles was tuned on: their recipes, ages and speeds, where
their software differs from each other's and from what is installed here, and which profiles should
be verified again. Such a folder is written by `autoprec tune TASK.py --ray` or --slurm, and
apply_profile(FOLDER) takes from it the profile of the device it runs on.
"""

_EXAMPLES = """\
examples:
  autoprec fleet status model.profiles
  autoprec fleet status model.profiles --price a100=1.80 --price zen4=0.40
                                          also how many samples one unit of the price buys
  autoprec fleet status model.profiles --json | jq '.types[] | select(.verify != [])'

A price is the cost of an hour, in any currency. Its NAME is matched against the words of a device's
name and family: a100 is the price of "NVIDIA A100-SXM4-40GB".

exit codes: 0 ok (also if profiles should be verified again), 2 no folder of profiles, or a price
            for a device that is not in it
"""


def add_parser(subparsers: Any) -> None:
    """Add the `fleet` subcommand."""
    parser = subparsers.add_parser(
        "fleet",
        help="show what the profiles of several device types say together",
        description="What a folder of profiles, one for each device type, says together.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = actions.add_parser(
        "status",
        help="show types, profiles, ages, software drift, speed for money, what to verify again",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    status.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of profiles")
    status.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=COST",
        help="cost per hour of a device type, such as a100=1.80; may be repeated",
    )
    status.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show the status, and return the exit code."""
    from autoprec.api import fleet_status
    from autoprec.cli.json_output import print_json
    from autoprec.reporting.fleet import print_fleet_status

    prices = _prices(arguments.price)
    status = fleet_status(arguments.folder, prices=prices)
    if arguments.json:
        print_json(status)
    else:
        print_fleet_status(status)
    return 0


def _prices(given: list[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in given:
        name, _, cost = text.rpartition("=")
        try:
            value = float(cost)
        except ValueError:
            value = 0.0
        if not name.strip() or not value > 0:
            raise UsageError(
                f"--price {text!r} given, expected NAME=COST with a cost per hour above 0, such as "
                "a100=1.80"
            )
        if name.strip() in prices:
            raise UsageError(f"--price {name.strip()} is given twice; give one cost")
        prices[name.strip()] = value
    return prices
