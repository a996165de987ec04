"""A piece of the GPU's evidence, whose workers are forked from one process that has torch.

A tuning waits for no other process, and does not time the device's products: a piece of its own.
"""

from __future__ import annotations

import sys

from autoprec import probing
from autoprec.tuning import job
from benchmarks.gpu import pieces
from tests.fork_server import ForkServer, forked_workers

SHARED = ("autoprec.workers", "autoprec.core", "autoprec.backends.shared")


def main() -> int:
    """Run the piece that the words of the command line name."""
    job.PATIENCE_SECONDS = 0.0
    probing.measure_device = lambda facts, software: facts
    server = ForkServer((*SHARED, "autoprec.backends.torch", "torch._dynamo"))
    try:
        with forked_workers(server):
            return pieces.main()
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
