"""One call of attention over a divided sequence: its arguments checked, and agreed on by all ranks of the axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commlib.context_parallel import Heads, Layout, Mask, Window, check_key_mask, check_rate, steps
from commlib.context_parallel.ring import Ring
from commlib.context_parallel.sequences import Terms, settle_with
from commlib.errors import UsageError
from commlib.sharding.axis import Axis

METHODS = ("ring", "all_to_all")
FLOATS = ("float64", "float32", "bfloat16", "float16")
WHAT = "attention"


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor, as far as the core sees it, or none, without a dtype. learns: whether it gets a gradient."""

    dtype: str = ""
    shape: Sequence[int] = ()
    learns: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a call beside its tensors: those of `attention`, under the same names."""

    causal: bool = False
    scale: float | None = None
    layout: str = "balanced"
    length: int | None = None
    documents: Iterable[int] | None = None
    window: tuple[int, int] | None = None
    method: str = "ring"
    dropout_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Attention:
    """What was asked for. method: one of METHODS.

    scale: positive; scores are those of `sign` times the queries, so that what is hidden stays so. mask: of queries and
    keys, if there is one; hides_keys: whether there is one of keys. dropout: the share of weights that is dropped.
    """

    axis: Axis
    heads: Heads
    terms: Terms
    method: str
    scale: float
    sign: int
    window: Window
    mask: Mask | None
    hides_keys: bool
    dropout: float

    @classmethod
    def of(cls, axis: Axis, tensors: Sequence[Given], options: Options, device: str = "") -> Attention:
        """Return a call on tensors (q, k, v, mask, key_mask), on a kind of device.

        Raises UsageError for what no rank may ask for.
        """
        q, k, v, mask, key_mask = tensors
        dropout, method = check_rate(WHAT, options.dropout_p), options.method
        if method not in METHODS:
            raise UsageError(f"attention: method is {method!r}, expected {' or '.join(map(repr, METHODS))}")
        dtypes = [x.dtype for x in (q, k, v)]
        if len(set(dtypes)) > 1 or dtypes[0] not in FLOATS:
            raise UsageError(f"attention: q, k, v are {', '.join(dtypes)}: expected one of {', '.join(FLOATS)} for all")
        heads = Heads.of(WHAT, q.shape, k.shape, v.shape, axis.size)
        scale = q.shape[3] ** -0.5 if options.scale is None else float(options.scale)
        if not math.isfinite(scale):
            raise UsageError(f"attention: scale is {scale}, expected a finite number")
        window = Window.of(WHAT, options.window, bool(options.causal))
        batch, tokens = q.shape[0], q.shape[2]
        masked = None if not mask.dtype else Mask.of(WHAT, mask.dtype, mask.shape, batch, heads.queries, tokens)
        if hides_keys := bool(key_mask.dtype):
            check_key_mask(WHAT, key_mask.dtype, key_mask.shape, batch, tokens)
        alike = {
            "method": method, "causal": bool(options.causal), "scale": scale, "dtype": dtypes[0], "batch": batch,
            "device": device, "heads of q": heads.queries, "heads of k and v": heads.keys,
            "head_dim of q and k": q.shape[3], "head_dim of v": v.shape[3], "window": tuple(window),
            "dropout_p": dropout, "key_mask": hides_keys, "mask": "none",
            "learns": q.learns or k.learns or v.learns,  # they have one backward, which each rank must run
        }  # fmt: skip
        if masked is not None:  # each rank's has its own queries
            alike["mask"] = f"{masked.dtype}, {masked.batch} x {masked.heads} x {masked.keys}, learns: {mask.learns}"
        terms = Terms.of(WHAT, options.layout, options.length, options.documents, alike)
        sign = (scale > 0) - (scale < 0)
        return cls(axis, heads, terms, method, abs(scale) or 1.0, sign, window, masked, hides_keys, dropout)

    def agree(self, tokens: int, seed: int = 0) -> tuple[Layout, int]:
        """Return how the sequence is divided, of which this rank has some tokens, and the first rank's seed.

        Collective: see `settle`. Raises UsageError, as all ranks do, for a mask of another number of keys.
        """
        layout, seed = settle_with(self.axis, self.terms, tokens, seed)
        if self.mask is not None:
            self.mask.check_keys(WHAT, layout.length)
        return layout, seed

    def agree_backward(self, tokens: int) -> None:
        """Let the ranks agree that they run the backward of the same call now. Collective."""
        settle_with(self.axis, replace(self.terms, what="attention, backward"), tokens, 0)

    @property
    def causal(self) -> bool:
        """Whether nothing to the right is seen."""
        return self.window.right == 0

    @property
    def is_plain(self) -> bool:
        """Whether each query sees all keys of its document, or all up to itself, and no weight is dropped."""
        return self.window.left is None and self.window.right in (None, 0) and not self.is_selective

    @property
    def is_selective(self) -> bool:
        """Whether single weights are hidden, changed or dropped."""
        return self.mask is not None or self.hides_keys or self.dropout > 0

    def bounds(self, layout: Layout) -> tuple[int, ...]:
        """Return where documents begin and the last one ends. Raises UsageError, as all ranks do."""
        return self.terms.bounds(layout)

    def ring(self, layout: Layout, rank: int) -> Ring:
        """Return a rank's steps round the ring."""
        return Ring(steps(layout, rank, self.causal, self.bounds(layout), self.window), layout.counts)
