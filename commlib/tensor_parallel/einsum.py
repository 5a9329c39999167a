"""Einsum: find the dimensions of a kernel that are outputs of its layer, and those that are summed. [pure]"""

from __future__ import annotations

import re
from dataclasses import dataclass

from commlib.errors import UsageError

_EQUATION = re.compile(r"([a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*),([a-zA-Z]+)->([a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*)")


@dataclass(frozen=True, slots=True)
class EinsumDim:
    """A letter of an equation: its dimension in the kernel, and in the input or output (after dots from the end)."""

    letter: str
    kernel: int
    outside: int


@dataclass(frozen=True, slots=True)
class Einsum:
    """An equation of an input and a kernel, such as "abc,cde->abde"."""

    inputs: str
    kernel: str
    outputs: str

    @classmethod
    def of(cls, what: str, equation: str) -> Einsum:
        """Return an equation from its text. Raises UsageError unless it has two operands."""
        match = _EQUATION.fullmatch(equation.replace(" ", ""))
        if match is None:
            raise UsageError(f"{what}: equation {equation!r}: expected an input, a kernel and an output: 'ab,bc->ac'")
        return cls(*match.groups())

    @property
    def columns(self) -> tuple[EinsumDim, ...]:
        """The kernel's dimensions that only the output has, in the kernel's order."""
        return self._places(self.outputs, self.inputs)

    @property
    def rows(self) -> tuple[EinsumDim, ...]:
        """The kernel's dimensions that only the input has, over which products are summed."""
        return self._places(self.inputs, self.outputs)

    def bias(self, letter: str, axes: str) -> int | None:
        """Return the dimension of a letter in a bias with these letters of the output; None if the bias lacks it.

        A bias of Keras starts at the first of its letters, and has all dimensions of the output from there on.
        """
        if letter not in axes:
            return None
        letters = self.outputs.replace("...", "")
        return letters.index(letter) - min(letters.index(one) for one in axes)

    def _places(self, within: str, without: str) -> tuple[EinsumDim, ...]:
        return tuple(
            EinsumDim(letter, at, _position(within, letter))
            for at, letter in enumerate(self.kernel)
            if letter in within and letter not in without
        )


def _position(spec: str, letter: str) -> int:
    before, _, after = spec.partition("...")
    return before.index(letter) if letter in before else after.index(letter) - len(after)
