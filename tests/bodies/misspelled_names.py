"""A misspelled name of a module gets the nearest one, and is otherwise missing as any other name is."""

from __future__ import annotations

from importlib import import_module

import pytest


def check_misspelled(module: str, misspelled: str, near: str) -> None:
    found = import_module(module)
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute '{misspelled}'; did you mean '{near}'"):
        getattr(found, misspelled)
    assert not hasattr(found, misspelled)
    with pytest.raises(ImportError, match=misspelled):
        exec(f"from {module} import {misspelled}")
