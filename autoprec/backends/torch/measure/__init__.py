"""Describes a PyTorch task and times its training steps."""
