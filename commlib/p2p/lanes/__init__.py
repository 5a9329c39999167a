"""Lanes: rings of shared memory that carry the messages between two ranks of a node."""
