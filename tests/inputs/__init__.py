"""Inputs for tests: models, traces, timelines, environments of launchers."""
