"""Records how a Keras task trains numerically."""
