"""Snapshots: save a model's state before a call, restore it afterwards, and warn of state that cannot be restored."""
