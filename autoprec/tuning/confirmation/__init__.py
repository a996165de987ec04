"""Chooses among the proven recipes, and measures the choice against the baseline."""
