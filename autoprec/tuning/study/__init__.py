"""Keeps trials and verdicts on disk, so that a tuning can be resumed."""
