"""Collectives within a node: the board of its ranks, and reductions in shared memory."""
