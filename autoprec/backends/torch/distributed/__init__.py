"""PyTorch models that several processes (ranks) train together."""
