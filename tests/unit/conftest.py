"""Unit tests know no deadline: a machine under load is slow, and nothing is wrong."""

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
