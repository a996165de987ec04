"""Runs a Keras task as its author would: seeding, data, model, one training step."""
