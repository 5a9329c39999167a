"""Halt flag: stop the compiled functions of one end of a channel, so that Python handles its calls."""

from __future__ import annotations

from commlib.dtypes import Array
from commlib.kernels.host.channel import HALTED


class HaltFlag:
    """The field HALTED of an end. It is set while the end is halted, or queued messages go first.

    fields: the end's fields for compiled functions.
    """

    __slots__ = ("_fields", "halted", "is_deferred")

    def __init__(self, fields: Array, *, halted: bool) -> None:
        self._fields, self.halted, self.is_deferred = fields, halted, False
        fields[HALTED] = halted

    def halt(self, *, yes: bool) -> None:
        """Stop the end (yes), or let it continue (no)."""
        self.halted = yes
        self._fields[HALTED] = yes or self.is_deferred

    def defer(self, *, yes: bool) -> None:
        """Stop only the compiled functions, because queued messages go first (yes), or end this (no)."""
        self.is_deferred = yes
        self._fields[HALTED] = yes or self.halted
