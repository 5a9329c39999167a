"""Plugins of pytest: several ranks, variants, repeated runs."""
