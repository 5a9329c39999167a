"""Commands of two words: `commlib bench sweep` beside `commlib bench VERB`, where the second is an argument."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TwoWords(TyperGroup):
    """Take the first two words as one command where there is such a one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command and what follows it."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)
