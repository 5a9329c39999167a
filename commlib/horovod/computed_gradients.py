"""ComputedGradients: keep `apply_gradients` from reducing again what `compute_gradients` has reduced.

Which gradients those are is known by the objects. Where others come instead, they may be what the caller made of them,
clipped say: to average what is equal on all ranks changes nothing, so then they are reduced again; to add it up would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.errors import UsageError


class ComputedGradients:
    """Remember the gradients that were reduced and given to the caller."""

    def __init__(self) -> None:
        self._given: list[Any] | None = None

    def note(self, gradients: Sequence[Any]) -> None:
        """Remember gradients that are reduced."""
        self._given = [gradient for gradient in gradients if gradient is not None]

    def are(self, gradients: Sequence[Any], *, else_averaged: bool) -> bool:
        """Return whether gradients that are to be applied are those that were noted; forget these.

        else_averaged: to reduce them again would change nothing. Raises UsageError where it would, and they might be.
        """
        given, self._given = self._given, None
        if given is None:
            return False
        known = {id(gradient) for gradient in given}
        if all(gradient is None or id(gradient) in known for gradient in gradients):
            return True
        if else_averaged:
            return False
        raise UsageError(
            "apply_gradients() got other gradients than compute_gradients() returned. If they were made of those, they "
            "are reduced already, and another sum would be too large: hand over what compute_gradients() returned, "
            "use op=Average, or take gradients from a tf.GradientTape, to be reduced when they are applied"
        )
