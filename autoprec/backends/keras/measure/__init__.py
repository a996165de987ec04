"""Describes a Keras task and times its training steps."""
