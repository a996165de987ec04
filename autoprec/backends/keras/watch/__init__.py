"""Checks a Keras training while it goes on: one batch now and then, once more in float32."""
