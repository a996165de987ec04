"""What is known of a device, which policies follow from it, and what bounds a step on it."""
