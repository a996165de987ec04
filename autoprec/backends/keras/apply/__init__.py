"""Applies a recipe to a Keras model, and the `Precision` that its script holds."""
