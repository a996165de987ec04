"""Searches the space of recipes and re-ranks the fastest by interleaved timing."""
