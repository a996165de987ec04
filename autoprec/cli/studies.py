"""`autoprec studies`: the trials that tunings keep, so that they can be resumed."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from autoprec.errors import UsageError

_EXAMPLES = """\
examples:
  autoprec studies                          # every study in the cache
  autoprec studies show model.py            # its tunings and their trials
  autoprec studies clear model.py           # remove it: the next tuning starts again
  autoprec studies clear --older-than 90    # remove what was not used for 90 days
  optuna-dashboard "$(autoprec studies path model.py)"

A study is a task file, a journal, an Optuna storage URL (show only), or the task's name. Profiles
are not touched. AUTOPREC_CACHE names another cache directory.
"""


def add_parser(subparsers: Any) -> None:
    """Add the `studies` subcommand."""
    parser = subparsers.add_parser(
        "studies",
        help="list, show or clear the trials that tunings keep",
        description="List, show or clear the studies (trials) that tunings keep, to be resumed.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "show", "path", "clear"),
        default="list",
        help="what to do (default: list)",
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="for show, path and clear")
    parser.add_argument("--all", action="store_true", help="clear: every study in the cache")
    parser.add_argument(
        "--older-than",
        type=_days,
        metavar="DAYS",
        help="clear: those in the cache that were not used for so long",
    )
    parser.add_argument("--json", action="store_true", help="list, show: print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    _check(arguments)
    return int(_ACTIONS[arguments.action](arguments))


def _check(arguments: argparse.Namespace) -> None:
    action, named = arguments.action, bool(arguments.studies)
    ways = [named, arguments.all, arguments.older_than is not None]
    if action == "list" and any(ways):
        raise UsageError("`studies list` takes no study; expected show, path or clear before it")
    if action in ("show", "path") and (not named or any(ways[1:])):
        raise UsageError(f"`studies {action}` expected a study: a task file, a journal or a name")
    if action == "clear" and sum(ways) != 1:
        raise UsageError("`studies clear` expected one of: studies, --older-than DAYS, --all")


def _list(arguments: argparse.Namespace) -> int:
    from autoprec.cli.json_output import print_json
    from autoprec.reporting.studies import plain_study, print_studies
    from autoprec.tuning.study.kept_tunings import kept_studies
    from autoprec.tuning.study.storage import studies_folder

    studies = kept_studies()
    if arguments.json:
        print_json([plain_study(each) for each in studies])
    elif studies:
        print_studies(studies)
    else:
        print(f"no study is kept in {studies_folder() or 'a cache (AUTOPREC_CACHE is empty)'}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from autoprec.cli.json_output import print_json
    from autoprec.reporting.studies import plain_study, print_study
    from autoprec.tuning.study.kept_tunings import find_study

    studies = [find_study(name) for name in arguments.studies]
    for study in studies:
        if study.problem:
            raise UsageError(study.problem)
    if arguments.json:
        print_json([plain_study(each) for each in studies])
        return 0
    for study in studies:
        print_study(study)
    return 0


def _path(arguments: argparse.Namespace) -> int:
    from autoprec.tuning.study.kept_tunings import find_study

    for name in arguments.studies:
        print(find_study(name).place)
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    from autoprec.tuning.study.kept_tunings import (
        clear_studies,
        find_study,
        kept_studies,
        unused_for,
    )

    if arguments.studies:
        studies = tuple(find_study(name) for name in arguments.studies)
    else:
        studies = kept_studies()
        if not arguments.all:
            studies = unused_for(studies, arguments.older_than)
    kept = clear_studies(studies)
    for study in studies:
        if study not in kept:
            print(f"removed {study.place}", file=sys.stderr)
    for study in kept:
        print(f"kept {study.place}: a tuning is using it", file=sys.stderr)
    if not studies:
        print("there is nothing to remove", file=sys.stderr)
    return 1 if kept else 0


def _days(text: str) -> float:
    with contextlib.suppress(ValueError):
        days = float(text)
        if 0 <= days < 1e6:
            return days
    raise argparse.ArgumentTypeError(f"{text} given, expected a number of days")


_ACTIONS = {"list": _list, "show": _show, "path": _path, "clear": _clear}
