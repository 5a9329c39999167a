"""Observation: events and counters of operations, the flight recorder, and the diagnosis of hangs."""

from commlib.observe.counters import Count, Stats
from commlib.observe.recorder import Event, Phase

__all__ = ["Count", "Event", "Phase", "Stats"]
