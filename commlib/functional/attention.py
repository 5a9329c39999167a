"""One call of attention over a divided sequence: its arguments checked, and agreed on by all ranks of the axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.ring import Ring
from commlib.functional.sequences import Terms, settle
from commlib.tensor.context import Heads, Layout, steps

METHODS = ("ring", "all_to_all")
FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Attention:
    """What was asked for. method: one of METHODS."""

    axis: Axis
    heads: Heads
    terms: Terms
    method: str
    causal: bool
    scale: float

    @classmethod
    def of(
        cls,
        axis: Axis,
        q: Sequence[int],
        k: Sequence[int],
        v: Sequence[int],
        dtypes: Sequence[str],
        *,
        causal: bool,
        scale: float | None,
        layout: str,
        length: int | None,
        documents: Iterable[int] | None,
        method: str,
        dropout_p: float,
        device: str = "",
    ) -> Attention:
        """Return a call on tensors of these shapes and dtypes, on a kind of device.

        Raises UsageError for what no rank may ask for.
        """
        if dropout_p:
            raise UsageError(f"attention: dropout_p is {dropout_p}, but weights are not dropped here: drop the results")
        if method not in METHODS:
            raise UsageError(f"attention: method is {method!r}, expected {' or '.join(map(repr, METHODS))}")
        if len(set(dtypes)) > 1 or dtypes[0] not in FLOATS:
            raise UsageError(f"attention: q, k, v are {', '.join(dtypes)}: expected one of {', '.join(FLOATS)} for all")
        heads = Heads.of("attention", q, k, v, axis.size)
        scale = q[3] ** -0.5 if scale is None else float(scale)
        alike = {
            "method": method, "causal": bool(causal), "scale": scale, "dtype": dtypes[0], "batch": q[0],
            "device": device, "heads of q": q[1], "heads of k and v": k[1], "head_dim of q and k": q[3],
            "head_dim of v": v[3],
        }  # fmt: skip
        terms = Terms.of("attention", layout, length, documents, alike)
        return cls(axis, heads, terms, method, bool(causal), scale)

    def agree(self, tokens: int) -> Layout:
        """Return how the sequence is divided, of which this rank has some tokens. Collective: see `settle`."""
        return settle(self.axis, self.terms, tokens)

    def agree_backward(self, tokens: int) -> None:
        """Let the ranks agree that they run the backward of the same call now. Collective."""
        settle(self.axis, replace(self.terms, what="attention, backward"), tokens)

    def bounds(self, layout: Layout) -> tuple[int, ...]:
        """Return where documents begin and the last one ends. Raises UsageError, as all ranks do."""
        return self.terms.bounds(layout)

    def ring(self, layout: Layout) -> Ring:
        """Return this rank's steps round the ring."""
        return Ring(steps(layout, self.axis.rank, self.causal, self.bounds(layout)), layout.counts)
