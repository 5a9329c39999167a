"""Extras: say which command installs what this project can use beyond what it must have."""

from __future__ import annotations


def install(*extras: str) -> str:
    """Return, for a message, how to install one of these extras.

    The name commlib on PyPI belongs to another project, so it is always this checkout, or a wheel that was built of it.
    """
    commands = " or ".join(f'pip install ".[{extra}]"' for extra in extras)
    named = " or ".join(f"'{extra}'" for extra in extras)
    return f"install this project with its extra {named}: {commands} in its checkout"
