"""Oracles: correct results, and detectors of memory used after its end."""
