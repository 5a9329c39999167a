"""Unit tests have no deadline: a machine under load is slow without an error."""

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
