"""Traces written by hand, as an adapter would record them, and a proof of the equations that adapters find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.equations import NEW, Equation, Shape
from commlib.tensor_parallel.trace import ModelTrace, TraceStep


class WrittenTrace:
    """A model that is written down step by step. Each method returns the number of its result."""

    def __init__(self) -> None:
        self._steps: list[TraceStep] = []
        self._shapes: dict[int, Shape] = {}

    def step(self, layer: str, kind: str, inputs: Sequence[int], shapes: Sequence[Shape], **more: Any) -> list[int]:
        out = list(range(len(self._shapes), len(self._shapes) + len(shapes)))
        self._shapes |= dict(zip(out, shapes, strict=True))
        self._steps.append(TraceStep(layer, kind, tuple(inputs), tuple(out), **more))
        return out

    def given(self, *shape: int) -> int:
        return self.step("", "given", (), [shape])[0]

    def constant(self, *shape: int) -> int:
        return self.step("", "constant", (), [shape])[0]

    def weight(self, layer: str, *shape: int) -> int:
        return self.step(layer, "weight", (), [shape], text=f"a weight of {layer}")[0]

    def linear(self, name: str, x: int, features: int) -> int:
        *front, width = self._shapes[x]
        return self.step(name, "product", [x], [(*front, features)], text="Linear", size=(width, features))[0]

    def table(self, name: str, ids: int, words: int, features: int) -> int:
        shape = (*self._shapes[ids], features)
        return self.step(name, "table", [ids], [shape], text="Embedding", size=(words, features))[0]

    def attention(self, name: str, x: int, heads: int) -> int:
        return self.step(name, "attention", [x, x, x], [self._shapes[x]], text="Attention", size=(heads, heads))[0]

    def norm(self, name: str, x: int, *dims: int) -> int:
        equation = equations.dimwise(self._shapes[x], dims or (-1,))
        return self.step(name, "equation", [x], [self._shapes[x]], text="LayerNorm", equation=equation, weights=True)[0]

    def dropout(self, name: str, x: int) -> int:
        equation = equations.pointwise(self._shapes[x])
        return self.step(name, "equation", [x], [self._shapes[x]], text="Dropout", equation=equation, draws=True)[0]

    def prelu(self, name: str, x: int) -> int:
        equation = equations.pointwise(self._shapes[x])
        return self.step(name, "equation", [x], [self._shapes[x]], text="PReLU", equation=equation, weights=True)[0]

    def pointwise(self, *inputs: int, text: str = "add") -> int:
        shapes = [self._shapes[x] for x in inputs]
        rank = max(map(len, shapes))
        shape = tuple(max(s[at - rank] for s in shapes if len(s) >= rank - at) for at in range(rank))
        return self.step("", "equation", inputs, [shape], text=text, equation=equations.pointwise(*shapes))[0]

    def softmax(self, x: int, dim: int = -1) -> int:
        equation = equations.dimwise(self._shapes[x], (dim,))
        return self.step("", "equation", [x], [self._shapes[x]], text="softmax", equation=equation)[0]

    def mean(self, x: int, dim: int) -> int:
        shape = self._shapes[x]
        equation = equations.reduction(shape, (dim,))
        axis = dim % len(shape)
        return self.step("", "equation", [x], [(*shape[:axis], *shape[axis + 1 :])], text="mean", equation=equation)[0]

    def permute(self, x: int, *dims: int) -> int:
        shape = self._shapes[x]
        out = tuple(shape[dim] for dim in dims)
        return self.step("", "equation", [x], [out], text="permute", equation=equations.selection(len(shape), dims))[0]

    def pick(self, x: int, dim: int) -> int:
        shape = self._shapes[x]
        dims = [at for at in range(len(shape)) if at != dim % len(shape)]
        out = tuple(shape[at] for at in dims)
        return self.step("", "equation", [x], [out], text="select", equation=equations.selection(len(shape), dims))[0]

    def matmul(self, left: int, right: int) -> int:
        first, second = self._shapes[left], self._shapes[right]
        shape = (*first[:-1], second[-1])
        equation = equations.product(first, second)
        return self.step("", "equation", [left, right], [shape], text="matmul", equation=equation)[0]

    def attend(self, q: int, k: int, v: int) -> int:
        shapes = [self._shapes[x] for x in (q, k, v)]
        out = (*shapes[0][:-1], shapes[2][-1])
        equation: Equation = equations.attention(*shapes)
        return self.step("", "equation", [q, k, v], [out], text="attention", equation=equation)[0]

    def reshape(self, x: int, *shape: int, asked: Shape = ()) -> int:
        return self.step("", "reshape", [x], [shape], text="reshape", requested=asked)[0]

    def split(self, x: int, *lengths: int, dim: int = -1, asked: Shape = ()) -> list[int]:
        shape, at = self._shapes[x], dim % len(self._shapes[x])
        shapes = [(*shape[:at], length, *shape[at + 1 :]) for length in lengths]
        return self.step("", "split", [x], shapes, text="chunk", dim=dim, requested=asked)

    def cat(self, *inputs: int, dim: int = -1) -> int:
        shapes = [self._shapes[x] for x in inputs]
        at = dim % len(shapes[0])
        shape = (*shapes[0][:at], sum(s[at] for s in shapes), *shapes[0][at + 1 :])
        return self.step("", "join", inputs, [shape], text="cat", dim=dim)[0]

    def unknown(self, x: int) -> int:
        return self.step("", "unknown", [x], [self._shapes[x]], text="fancy")[0]

    def heads(self, x: int, heads: int) -> int:
        """Return features as heads: (rows, tokens, features) -> (rows, heads, tokens, their features)."""
        rows, tokens, features = self._shapes[x]
        cut = self.reshape(x, rows, tokens, heads, features // heads, asked=(rows, tokens, -1, features // heads))
        return self.permute(cut, 0, 2, 1, 3)

    def joined(self, x: int) -> int:
        """Return heads as features again."""
        rows, heads, tokens, width = self._shapes[x]
        return self.reshape(self.permute(x, 0, 2, 1, 3), rows, tokens, heads * width, asked=(rows, tokens, -1))

    def trace(
        self, *outputs: int, tied: Sequence[tuple[str, ...]] = (), whole: bool = True, kept: Sequence[int] = ()
    ) -> ModelTrace:
        return ModelTrace(tuple(self._steps), dict(self._shapes), outputs, tuple(tied), whole, retained=tuple(kept))


def _half(equation: Equation, label: int, arrays: Sequence[Any], half: int) -> list[Any]:
    """Return one half of each input along a dimension, of those that have it."""
    halves = []
    for array, labels in zip(arrays, equation.inputs, strict=True):
        at = labels.index(label) if label in labels else None
        halves.append(array if at is None else np.split(array, 2, at)[half])
    return halves


def holds(equation: Equation, run: Any, *arrays: Any) -> int:
    """Check that halves of inputs along a dimension of the result give its halves; return the number of checks.

    run: computes a numpy array of numpy arrays. Dimensions that are needed, or are of odd length, are omitted.
    """
    whole = run(*arrays)
    assert len(equation.output) == whole.ndim
    checked = 0
    for at, label in enumerate(equation.output):
        lengths = {a.shape[d.index(label)] for a, d in zip(arrays, equation.inputs, strict=True) if label in d}
        if label == NEW or label in equation.needs or not lengths or any(length % 2 for length in lengths):
            continue
        halves = [run(*_half(equation, label, arrays, half)) for half in range(2)]
        np.testing.assert_allclose(np.concatenate(halves, at), whole, atol=1e-12)
        checked += 1
    return checked
