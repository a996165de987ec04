"""Records how a PyTorch task trains numerically."""
