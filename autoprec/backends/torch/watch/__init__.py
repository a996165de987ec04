"""Checks a training while it goes on: one micro-batch now and then, once more in float32."""
