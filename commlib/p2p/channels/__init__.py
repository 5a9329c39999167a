"""Channels: a fixed sender and receiver that exchange many arrays, on a node or between nodes."""
