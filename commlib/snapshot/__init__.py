"""Snapshots: what a model holds before a call, put back after it, and warnings of what cannot be put back."""
