"""One call of attention over a sharded sequence: check its arguments, and agree on them along the axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from commlib.context_parallel import Heads, Mask, SequenceLayout, Window, check_key_mask, check_rate, steps
from commlib.context_parallel.ring import ContextRing
from commlib.context_parallel.sequences import SequenceSpec, settle_with
from commlib.errors import UsageError
from commlib.literals import AttentionMethod
from commlib.sharding.axis import ParallelAxis

METHODS: tuple[str, ...] = get_args(AttentionMethod)
FLOATS = ("float64", "float32", "bfloat16", "float16")
WHAT = "attention"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype and shape of a tensor; the default means no tensor. learns: whether it gets a gradient."""

    dtype: str = ""
    shape: Sequence[int] = ()
    learns: bool = False


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The arguments of a call other than its tensors: those of `attention`, under the same names."""

    causal: bool = False
    scale: float | None = None
    layout: str = "balanced"
    length: int | None = None
    documents: Iterable[int] | None = None
    window: tuple[int, int] | None = None
    method: str = "ring"
    dropout_p: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The checked arguments of a call. method: one of METHODS.

    scale: positive; queries are multiplied by `sign`, so that masked scores stay masked. mask: of queries and keys, if
    given; hides_keys: whether a mask of keys is given. dropout: the share of weights that is dropped.
    """

    axis: ParallelAxis
    heads: Heads
    terms: SequenceSpec
    method: str
    scale: float
    sign: int
    window: Window
    mask: Mask | None
    hides_keys: bool
    dropout: float

    @classmethod
    def of(
        cls, axis: ParallelAxis, tensors: Sequence[TensorInfo], options: AttentionOptions, device: str = ""
    ) -> AttentionCall:
        """Return a call on tensors (q, k, v, mask, key_mask), on a kind of device.

        Raises UsageError for arguments that are invalid on every rank.
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
            "learns": q.learns or k.learns or v.learns,  # one backward for all three, which each rank must run
        }  # fmt: skip
        if masked is not None:  # each rank's mask has its own queries
            alike["mask"] = f"{masked.dtype}, {masked.batch} x {masked.heads} x {masked.keys}, learns: {mask.learns}"
        terms = SequenceSpec.of(WHAT, options.layout, options.length, options.documents, alike)
        sign = (scale > 0) - (scale < 0)
        return cls(axis, heads, terms, method, abs(scale) or 1.0, sign, window, masked, hides_keys, dropout)

    def agree(self, tokens: int, seed: int = 0) -> tuple[SequenceLayout, int]:
        """Return the layout of the sequence, given this rank's number of tokens, and the first rank's seed.

        Collective: see `settle`. Raises UsageError on all ranks for a mask with a wrong number of keys.
        """
        layout, seed = settle_with(self.axis, self.terms, tokens, seed)
        if self.mask is not None:
            self.mask.check_keys(WHAT, layout.length)
        return layout, seed

    def agree_backward(self, tokens: int) -> None:
        """Check that all ranks run the backward of the same call now. Collective."""
        settle_with(self.axis, replace(self.terms, what="attention, backward"), tokens, 0)

    @property
    def causal(self) -> bool:
        """Whether keys to the right are hidden."""
        return self.window.right == 0

    @property
    def is_plain(self) -> bool:
        """Whether each query sees all keys of its document, or all keys up to itself, and no weight is dropped."""
        return self.window.left is None and self.window.right in (None, 0) and not self.is_selective

    @property
    def is_selective(self) -> bool:
        """Whether single weights are hidden, changed or dropped."""
        return self.mask is not None or self.hides_keys or self.dropout > 0

    def bounds(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Return the starts of documents, and the end of the last one. Raises UsageError on all ranks."""
        return self.terms.bounds(layout)

    def ring(self, layout: SequenceLayout, rank: int) -> ContextRing:
        """Return a rank's steps around the ring."""
        return ContextRing(steps(layout, rank, self.causal, self.bounds(layout), self.window), layout.counts)
