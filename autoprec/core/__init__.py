"""Decides, and never looks: standard library only, no files, clock, environment or randomness."""
