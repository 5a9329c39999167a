"""Comparison: make sure that ranks have the same settings, parameters and gradients, and name those that differ."""
