"""Tunes on the nodes of a cluster, one node of each type; the schedulers are Ray and SLURM."""
