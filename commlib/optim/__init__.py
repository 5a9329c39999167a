"""Optimizer arithmetic for both frameworks: clipping by a global norm, 1-bit Adam and 1-bit LAMB."""
