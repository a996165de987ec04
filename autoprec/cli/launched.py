"""`autoprec tune` under a launcher such as torchrun, which starts it once for every rank.

The tuner starts rank processes of its own, for every trial may end them. So of the launcher's
processes rank 0 tunes, and the others have nothing to do.
"""

from __future__ import annotations

import os
import sys

from autoprec.errors import UsageError


def ranks_to_tune(nproc: int | None) -> int | None:
    """Return the number of ranks to tune for; None where another process of a launcher tunes.

    `nproc` is what was asked for; under a launcher it is the number of processes it started.
    """
    from autoprec.workers.environment import outer_launcher

    launcher = outer_launcher(os.environ)
    if launcher is None:
        return 1 if nproc is None else nproc
    if not launcher.one_machine:
        raise UsageError(
            f"a launcher started {launcher.world_size} processes on several machines, and a tuning "
            "runs on one: start `autoprec tune` on one of them, with --nproc"
        )
    if nproc not in (None, launcher.world_size):
        raise UsageError(
            f"--nproc {nproc} given, but the launcher started {launcher.world_size} processes: "
            "leave --nproc out, or start `autoprec tune` without a launcher"
        )
    if launcher.rank == 0:
        return launcher.world_size
    print(
        f"autoprec: rank 0 tunes with {launcher.world_size} rank processes of its own; "
        f"rank {launcher.rank} of the launcher has nothing to do and ends here",
        file=sys.stderr,
    )
    return None
