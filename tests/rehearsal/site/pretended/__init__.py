"""The pretended accelerator: what a process that rehearses one has in place of the hardware."""
