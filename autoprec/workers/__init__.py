"""Runs the user's code in child processes: starts, calls, times and ends them."""
