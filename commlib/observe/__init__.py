"""Records of what a rank does: events and counters, the timeline, dumps and diagnosis of hangs."""

from commlib.observe.counters import Count, Stats
from commlib.observe.recorder import Event, Phase

__all__ = ["Count", "Event", "Phase", "Stats"]
