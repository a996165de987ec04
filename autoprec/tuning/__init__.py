"""Tunes a task: preflight, search, race, proof, confirmation, profile. Emits events; prints nothing."""
