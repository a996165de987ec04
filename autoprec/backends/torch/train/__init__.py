"""Runs a PyTorch task as its author would: seeding, data, model, optimizer, loss."""
