"""Decides what to measure next, what is fastest and when to stop, from what was measured alone."""
