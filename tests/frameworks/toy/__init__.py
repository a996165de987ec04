"""A small framework, and its backend for autoprec."""

from toy.framework import Linear, endless_samples

__all__ = ["Linear", "endless_samples"]
