"""Looks at the machine: catalogue, observation and probes. Never imports a framework."""
