"""Decides what changes in a recipe when several devices train together."""
