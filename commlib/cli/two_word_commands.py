"""Commands of two words: `commlib bench sweep`, although `commlib bench VERB` takes any verb as its argument."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TwoWordCommands(TyperGroup):
    """Treats the first two words as one command, if such a command exists."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command and its remaining arguments."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)
