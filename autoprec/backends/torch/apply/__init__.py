"""Applies a recipe to a PyTorch model, and the `Precision` that its loop talks to."""
