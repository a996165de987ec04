"""Tunes a task: preflight, search, race, proof, confirmation, profile. It prints nothing."""
