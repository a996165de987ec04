"""Tunes a task: preflight, search, proof, confirmation, profile. Emits events; prints nothing."""
