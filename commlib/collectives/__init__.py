"""Collectives: verbs, the paths that carry them out on hosts and devices, and what they share."""
