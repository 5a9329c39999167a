"""Inputs made for tests: models, traces, timelines, environments of launchers."""
