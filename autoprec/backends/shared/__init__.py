"""What the backends share that names no framework."""
