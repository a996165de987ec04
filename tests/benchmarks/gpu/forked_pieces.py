"""A piece of the GPU's evidence, whose workers are forked from one process that has torch.

Nothing waits for other processes, and no tuning times the device's products: they are a piece.
"""

from __future__ import annotations

import sys

from autoprec import probing
from autoprec.workers import cpu_contention
from benchmarks.gpu import pieces
from tests.fork_server import ForkServer, forked_workers

SHARED = ("autoprec.workers", "autoprec.core", "autoprec.backends.shared")


def main() -> int:
    """Run the piece that the words of the command line name."""
    cpu_contention.ProcessorUsage._read = lambda meter, pids: None
    probing.measure_device = lambda facts, software: facts
    server = ForkServer((*SHARED, "autoprec.backends.torch", "torch._dynamo"))
    try:
        with forked_workers(server):
            return pieces.main()
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
