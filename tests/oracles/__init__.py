"""Oracles: what a result must be, and detectors of memory used after its end."""
