"""The hardware of this machine: catalogue, observation and probes. No framework is imported."""
