"""Observation: events and counters of operations, the flight recorder, and the diagnosis of hangs."""
