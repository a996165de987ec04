"""The loop: task file, search, worker processes, proof, finish. Emits events; prints nothing."""
