"""A package so that `tests.plugins.multirank` is this one, whatever else is installed under the name `tests`."""
