"""Extras: the commands that install this project's optional dependencies."""

from __future__ import annotations


def install(*extras: str) -> str:
    """Return an instruction, for a message, to install one of these extras.

    The name commlib on PyPI belongs to another project, so the command installs from this checkout.
    """
    commands = " or ".join(f'pip install ".[{extra}]"' for extra in extras)
    named = " or ".join(f"'{extra}'" for extra in extras)
    return f"install this project with its extra {named}: {commands} in its checkout"
