"""A backend made of formulas, so that the tuner is tested without a framework or a device."""

from simulated.model import SimulatedModel

__all__ = ["SimulatedModel"]
