"""Verbs: one module for each collective, with its arguments, checks and paths."""
