"""Processes: how this one ends and forks, and how it runs others."""
