"""Likeness along an axis: of inputs of divided layers, of gradients of what these give, and of whole weights.

Else they part, and nobody sees it: each rank trains another model. A norm of this rank's gradients alone by which all
are clipped, other batches, labels or seeds along the axis, values from outside of which a rank has a part of the
gradient: all of it shows in one of the three. What is noted between two steps is compared before some of them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from commlib.comparison.agreement import all_told
from commlib.comparison.whole_weights import MOST, direction, is_due, tolerance_of, worst_of
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.sharding.axis import Axis

_NOTES = 256
"""Tensors that are noted between two comparisons."""
_INFINITE = 1e4
"""What infinite elements count as, so that norms and sums are finite."""
_NEEDED = (
    "Ranks of an axis of divided layers need the same batches and seeds: the same inputs, labels and losses in one "
    "order, and one seed where what is whole draws random numbers, as dropout does (streams.seed(mesh, number)); clip "
    "by the norm of whole weights (clip_grad_norm, clip_by_global_norm with variables=), not by one of this rank's "
    "parts; and let values of which gradients are needed enter divided layers through a Column, or "
    "Replicate(into_sharded=True)"
)


DIVIDE = (
    "divide it among the ranks before (shard_sequence, or a SequenceLoader), or leave sequence= out of the plan, and "
    "Sequence()"
)
"""What to do with a whole sequence that is taken for a part."""


def stride(elements: int) -> int:
    """Return how far apart the elements of a tensor lie that are looked at: odd, so that no column is left out."""
    return -(-elements // MOST) | 1


def whole_shape(shape: Sequence[int | None], sequence: int | None) -> tuple[int | None, ...]:
    """Return what ranks know alike of a shape: not how long a part along `sequence` is, as parts may be uneven."""
    found = list(shape)
    if sequence is not None:
        found[sequence] = None
    return tuple(found)


class Note(NamedTuple):
    """A tensor that ranks must have alike, or, where `is_part`, each a part of.

    what, layer: which, of which layer (names may differ between ranks). norm: of its elements; of a part 1 if it tells
    anything, else 0. print: their sum with weights of their own, so that other orders and signs differ; of integers
    and parts a digest.
    """

    what: str
    layer: str
    shape: tuple[int | None, ...]
    dtype: str
    norm: float
    print: float
    is_gradient: bool = False
    is_part: bool = False

    @property
    def line(self) -> str:
        """What ranks compare before its values."""
        return f"{self.what}, of shape {list(self.shape)}, {self.dtype}"

    def __str__(self) -> str:
        return f"{self.what} of {self.layer}, of shape {list(self.shape)}, {self.dtype}"

    @property
    def is_exact(self) -> bool:
        """Whether it has no rounding, as integers."""
        return not self.dtype.startswith(("float", "bfloat", "complex"))


class Watch:
    """What is noted on an axis until an optimizer's step compares it."""

    def __init__(self) -> None:
        self.on = True
        """Whether anything is noted now: before the first step, and between two of which the second one compares."""
        self.is_hidden = False
        """Whether what runs is only looked at."""
        self.notes: list[Note] = []
        self._awaited: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def takes(self) -> bool:
        """Whether one more is noted now."""
        return self.on and not self.is_hidden and len(self.notes) < _NOTES

    def taken(self) -> list[Note]:
        """Return what was noted, once."""
        notes, self.notes = self.notes, []
        return notes

    def passed(self, optimizer: Any, step: int) -> None:
        """Hear that an optimizer makes a step: notes are taken again if its next one compares, or another's does."""
        if is_due(step + 1):
            self._awaited.add(optimizer)
        else:
            self._awaited.discard(optimizer)
        self.on = len(self._awaited) > 0


def noted(
    what: str,
    layer: str,
    shape: tuple[int | None, ...],
    dtype: str,
    sample: Array,
    *,
    is_gradient: bool = False,
    is_part: bool = False,
    tells: bool = True,
) -> Note:
    """Return a note of a tensor. dtype: the framework's. sample: elements of it, at a `stride`; of integers all.

    tells: positions of a part differ from one another, so that equal parts are the same sequence.
    """
    if is_part or sample.dtype.kind not in "fc":
        digest = zlib.crc32(np.ascontiguousarray(sample).tobytes())
        return Note(what, layer, shape, dtype, float(tells), digest, is_part=is_part)
    flat = sample.reshape(-1)
    flat = (flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat).astype(np.float64)
    if not is_gradient and np.isinf(flat).any():  # a mask that is added to scores
        flat = np.where(np.isinf(flat), np.sign(flat) * _INFINITE, flat)
    norm = float(np.sqrt(flat @ flat))
    return Note(what, layer, shape, dtype, norm, float(flat @ direction()[: flat.size]), is_gradient=is_gradient)


def begin(axis: Axis) -> None:
    """Let an axis, over which weights are divided now, note what its ranks must have alike."""
    if axis.size > 1 and axis.watch is None:
        axis.watch = Watch()


@contextmanager
def unwatched(axis: Axis) -> Iterator[None]:
    """Note nothing for a while: a model is run to be looked at."""
    watch: Watch | None = axis.watch
    if watch is None or watch.is_hidden:
        yield
        return
    watch.is_hidden = True
    try:
        yield
    finally:
        watch.is_hidden = False


def check_alike(
    what: str,
    axis: Axis,
    notes: Sequence[Note],
    names: Sequence[str] = (),
    squares: Sequence[float] = (),
    dtypes: Sequence[str] = (),
) -> None:
    """Compare what was noted, and the gradients of whole weights by their sums of squares.

    Collective over the axis: two small messages. what: steps. names, squares, dtypes: of each weight. Nothing is said
    of what is not finite. Raises MismatchError on all ranks: with what they did not do alike, or the first tensor that
    differs, or the weight that differs most.
    """
    if axis.size == 1:
        return
    all_told(axis.comm, what, [*(note.line for note in notes), f"{len(names)} whole weights"], ())
    mine = [*(note.norm for note in notes), *(note.print for note in notes), *squares]
    if not mine:
        return
    everyone: Array = axis.comm.all_gather(np.array([mine], np.float64))
    norms, prints, sums = np.split(everyone, [len(notes), 2 * len(notes)], 1)
    start = f"{what} on rank {axis.rank} of {axis.comm.name}"
    said = [_differing_note(axis, notes, norms, prints), _differing_weight(axis, names, sums, dtypes)]
    if any(said):
        raise MismatchError(f"{start}: {'; and '.join(text for text in said if text)}. {_NEEDED}")
    _check_parts(start, notes, norms, prints)


def _differing_note(axis: Axis, notes: Sequence[Note], norms: Array, prints: Array) -> str:
    """Return what is said of the first tensor that differs; "" if none does."""
    finite: Array = np.isfinite(norms + prints).all(0)
    # What is zero but for rounding differs by as much as it has: so gradients are held against the largest, too.
    largest = max((norms[:, at].max() for at, note in enumerate(notes) if note.is_gradient and finite[at]), default=0.0)
    for at, note in enumerate(notes):
        if note.is_part or not finite[at]:
            continue
        apart = np.abs(prints[:, at] - prints[0, at])
        by, tolerance = "", 0.0
        if not note.is_exact:
            least = largest / 100 if note.is_gradient else 0.0
            apart = np.maximum(apart, np.abs(norms[:, at] - norms[0, at])) / max(norms[:, at].max(), least, 1e-300)
            by, tolerance = (
                f", by {apart.max():.2g} of its norm",
                tolerance_of(note.dtype, has_codec=axis.codec is not None),
            )
        if apart.max() > tolerance:
            other = int(apart.argmax())
            return (
                "ranks have other values where they must have the same: "
                f"{note}, differs between rank 0 and rank {other}{by}"
            )
    return ""


def _check_parts(start: str, notes: Sequence[Note], norms: Array, prints: Array) -> None:
    """Raise MismatchError if what is divided along a sequence is the same on all ranks, wherever it is noted."""
    parts = [at for at, note in enumerate(notes) if note.is_part]
    if parts and norms[:, parts].any() and (prints[:, parts] == prints[:1, parts]).all():
        raise MismatchError(
            f"{start}: {notes[parts[0]]}, is the same on all ranks, and so is all else that is divided along the "
            f"sequence, expected each rank's part of it: {DIVIDE}"
        )


def _differing_weight(axis: Axis, names: Sequence[str], squares: Array, dtypes: Sequence[str]) -> str:
    """Return what is said of the whole weight whose gradients differ most; "" if none do."""
    if (found := worst_of(squares, dtypes, axis.codec is not None)) is None:
        return ""
    worst, least, most = found
    norms = np.sqrt(squares[:, worst])
    return (
        "ranks have different gradients of a weight that is whole on each, and would part: that of "
        f"{names[worst]} has norm {norms[least]:.3g} on rank {least} and {norms[most]:.3g} on rank {most}"
    )
