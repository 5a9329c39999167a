"""A package so that `tests.multirank` is this one, whatever else is installed under the name `tests`."""
