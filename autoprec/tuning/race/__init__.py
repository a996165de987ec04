"""Times the fastest recipes in turns, in blocks that all of them share: who leads, by how much."""
