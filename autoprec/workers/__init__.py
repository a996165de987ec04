"""Runs the user's code in child processes: starts, calls, watches and ends them."""
