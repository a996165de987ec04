"""Searches the space of recipes; each trial times one of them once."""
