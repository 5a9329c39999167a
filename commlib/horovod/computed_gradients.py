"""ComputedGradients: keep `apply_gradients` from reducing the result of `compute_gradients` a second time.

Gradients are recognised by object identity. The caller may pass others that it made of them, by clipping for instance.
These are reduced again if that is harmless: an average of values that are equal on all ranks changes nothing, but a sum
would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.errors import UsageError


class ComputedGradients:
    """Remembers the reduced gradients that were returned to the caller."""

    def __init__(self) -> None:
        self.pending: list[Any] | None = None
        """The reduced gradients that were returned last; None once some have been applied."""

    def note(self, gradients: Sequence[Any]) -> None:
        """Remember reduced gradients."""
        self.pending = [gradient for gradient in gradients if gradient is not None]

    def are(self, gradients: Sequence[Any], *, else_averaged: bool) -> bool:
        """Return whether these gradients are the remembered ones; forget those.

        else_averaged: a second reduction would change nothing. Raises UsageError if it would, and the gradients may be
        reduced already.
        """
        given, self.pending = self.pending, None
        if given is None:
            return False
        known = {id(gradient) for gradient in given}
        if all(gradient is None or id(gradient) in known for gradient in gradients):
            return True
        if else_averaged:
            return False
        raise UsageError(
            "apply_gradients() got other gradients than compute_gradients() returned. If they are derived from those, "
            "they are already reduced, and another sum would be too large: pass the result of compute_gradients(), "
            "use op=Average, or take gradients from a tf.GradientTape, which apply_gradients() reduces"
        )
