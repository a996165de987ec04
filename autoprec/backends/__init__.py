"""The only place that imports a framework; listing the backends imports none."""
