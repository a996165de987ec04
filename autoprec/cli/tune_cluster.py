"""`autoprec tune --ray` and `--slurm`: a tuning on one node of each type of a cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autoprec.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from autoprec.workers.task_source import TaskSource

EXAMPLES = """\
  autoprec tune model.py --ray                    every device type of the Ray cluster this machine
                                                  belongs to; profiles in model.profiles/
  autoprec tune model.py --ray 10.0.0.1:6379 -o fleet/
                                                  the cluster at that address; profiles in fleet/
  autoprec tune model.py --slurm a100,l4          a SLURM job in each of two partitions
"""

#: The exit code if some type's tuning failed; those of the others have their profiles.
FAILED = 1


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options for clusters."""
    group = parser.add_argument_group(
        "cluster",
        "Nodes are probed and grouped by device; one of each type is tuned, all at once. The\n"
        "task file must be on every node. --output then names a folder (default: TASK.profiles/),\n"
        "which apply_profile takes.",
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="tune on a Ray cluster, by default on the one that this machine belongs to (after "
        "TASK.py)",
    )
    group.add_argument(
        *("--slurm", "--submitit"),
        metavar="PARTITION,...",
        help="tune in SLURM partitions, by jobs that srun starts",
    )


def is_asked_for(arguments: argparse.Namespace) -> bool:
    """Return whether a cluster is to be tuned on."""
    return arguments.ray is not None or arguments.slurm is not None


def run(arguments: argparse.Namespace, source: TaskSource, options: Any) -> int:
    """Tune on the cluster, print, and return the exit code."""
    from autoprec.api import tune_fleet
    from autoprec.cli.json_output import print_json
    from autoprec.fleet.journals import default_output, studies_folder
    from autoprec.reporting.fleet import FleetTerminal, print_fleet_result

    if arguments.ray is not None and arguments.slurm is not None:
        raise UsageError("--ray and --slurm given; give one of them")
    if arguments.plan:
        raise UsageError(
            f"--plan measures nothing, so it needs no cluster; omit --{_engine(arguments)}"
        )
    if arguments.quick:
        raise UsageError(f"--quick is for this machine; omit --{_engine(arguments)}")
    output = options.output or default_output(source.path)
    try:
        result = tune_fleet(
            source,
            ray=arguments.ray,
            slurm=_partitions(arguments.slurm),
            device=arguments.device,
            options=options,
            listener=(lambda name, event: None) if arguments.quiet else FleetTerminal(),
            output=output,
        )
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; finished trials are kept in {studies_folder(output)}. Run the same "
            "command to resume"
        ) from None
    if arguments.json:
        print_json(_plain(result))
    if not arguments.quiet:
        print_fleet_result(result, output)
    return FAILED if any(each.failed for each in result.types) else 0


def _partitions(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"--slurm {text!r} given, expected names of partitions: a100,l4")
    return names


def _plain(result: Any) -> dict[str, Any]:
    from autoprec.profiles import to_mapping

    return {
        "types": [
            {
                "name": each.type.name,
                "nodes": [node.name for node in each.type.nodes],
                "disagreements": list(each.type.disagreements),
                "file": each.file,
                "reason": each.reason,
                "failed": each.failed,
                "profile": None if each.profile is None else to_mapping(each.profile),
            }
            for each in result.types
        ],
        "left_out": [{"node": each.name, "reason": each.problem} for each in result.unfit],
    }


def _engine(arguments: argparse.Namespace) -> str:
    return "slurm" if arguments.ray is None else "ray"
