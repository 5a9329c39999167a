"""Equality along an axis: of inputs of sharded layers, of gradients of their outputs, and of unsharded weights.

Otherwise ranks silently train different models. Causes are clipping by the norm of this rank's gradients alone,
different batches, labels or seeds along the axis, and gradients of values from outside the sharded layers that are
only partial on each rank. Each of them shows in one of the three comparisons. Tensors are recorded between two steps
and compared before some of them.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from commlib.comparison.agreement import agree_on_numbers
from commlib.comparison.gradient_comparison import MOST, direction, is_due, tolerance_of, worst_of
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.sharding.axis import ParallelAxis

_NOTES = 256
"""Maximum number of tensors recorded between two comparisons."""
_INFINITE = 1e4
"""Value that replaces infinite elements, to keep norms and sums finite."""
_NEEDED = (
    "Ranks of an axis of sharded layers need the same batches and seeds: the same inputs, labels and losses in one "
    "order, and one seed for random numbers on unsharded values, such as dropout (streams.seed(mesh, number)). Clip "
    "by the norm of the full weights (clip_grad_norm, clip_by_global_norm with variables=), not by the norm of this "
    "rank's shards. Values that need gradients must enter sharded layers through a Column, or "
    "Replicate(into_sharded=True)"
)


DIVIDE = (
    "shard it among the ranks before the call (shard_sequence, or a SequenceLoader), or remove sequence= and "
    "Sequence() from the plan"
)
"""Remedy if a full sequence is passed where a shard of it is expected."""


def stride(elements: int) -> int:
    """Return the stride between the elements of a tensor that are compared: odd, so that no column is left out."""
    return -(-elements // MOST) | 1


def whole_shape(shape: Sequence[int | None], sequence: int | None) -> tuple[int | None, ...]:
    """Return a shape without the length along `sequence`, which may differ between ranks."""
    whole = list(shape)
    if sequence is not None:
        whole[sequence] = None
    return tuple(whole)


class Note(NamedTuple):
    """A tensor that must be equal on all ranks or, with `is_part`, a shard of a sequence on each.

    what, layer: the tensor and its layer (names may differ between ranks). norm: of its elements; for a shard 1 if its
    positions differ, else 0. print: a weighted sum of elements, with a different weight for each, so permutations and
    changes of sign show; for integers and shards a digest.
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
        """Description that ranks compare before the values."""
        return f"{self.what}, of shape {list(self.shape)}, {self.dtype}"

    def __str__(self) -> str:
        return f"{self.what} of {self.layer}, of shape {list(self.shape)}, {self.dtype}"

    @property
    def is_exact(self) -> bool:
        """Whether it has no rounding, like integers."""
        return not self.dtype.startswith(("float", "bfloat", "complex"))


class AxisWatch:
    """The tensors recorded on an axis until an optimizer's step compares them."""

    def __init__(self) -> None:
        self.on = True
        """Whether recording is on: before the first step, and before each step that compares."""
        self.is_hidden = False
        """Whether the current run is only a probe."""
        self.notes: list[Note] = []
        self._due_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def takes(self) -> bool:
        """Whether one more tensor can be recorded now."""
        return self.on and not self.is_hidden and len(self.notes) < _NOTES

    def take(self) -> list[Note]:
        """Return the recorded notes, and clear them."""
        notes, self.notes = self.notes, []
        return notes

    def passed(self, optimizer: Any, step: int) -> None:
        """Note an optimizer's step: recording is on if the next step of this or of another optimizer compares."""
        if is_due(step + 1):
            self._due_optimizers.add(optimizer)
        else:
            self._due_optimizers.discard(optimizer)
        self.on = len(self._due_optimizers) > 0


def note_tensor(
    what: str,
    layer: str,
    shape: tuple[int | None, ...],
    dtype: str,
    sample: Array,
    *,
    is_gradient: bool = False,
    is_part: bool = False,
    positions_differ: bool = True,
) -> Note:
    """Return a note of a tensor. dtype: the framework's. sample: elements of it, at a `stride`; all for integers.

    positions_differ: whether positions of a shard differ from one another, so that equal shards mean the same sequence.
    """
    if is_part or sample.dtype.kind not in "fc":
        digest = zlib.crc32(np.ascontiguousarray(sample).tobytes())
        return Note(what, layer, shape, dtype, float(positions_differ), digest, is_part=is_part)
    flat = sample.reshape(-1)
    flat = (flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat).astype(np.float64)
    if not is_gradient and np.isinf(flat).any():  # a mask that is added to scores
        flat = np.where(np.isinf(flat), np.sign(flat) * _INFINITE, flat)
    norm = float(np.sqrt(flat @ flat))
    return Note(what, layer, shape, dtype, norm, float(flat @ direction()[: flat.size]), is_gradient=is_gradient)


def begin(axis: ParallelAxis) -> None:
    """Start recording on an axis over which weights are sharded now."""
    if axis.size > 1 and axis.watch is None:
        axis.watch = AxisWatch()


@contextmanager
def pause_watch(axis: ParallelAxis) -> Iterator[None]:
    """Suspend recording while a model runs as a probe."""
    watch: AxisWatch | None = axis.watch
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
    axis: ParallelAxis,
    notes: Sequence[Note],
    names: Sequence[str] = (),
    squares: Sequence[float] = (),
    dtypes: Sequence[str] = (),
) -> None:
    """Compare the recorded notes, and the gradients of unsharded weights by their sums of squares.

    Collective over the axis: two small messages. what: steps. names, squares, dtypes: of each weight. Values that are
    not finite are not compared. Raises MismatchError on all ranks: with the calls that differ, or the first tensor that
    differs, or the weight that differs most.
    """
    if axis.size == 1:
        return
    agree_on_numbers(axis.comm, what, [*(note.line for note in notes), f"{len(names)} unsharded weights"], ())
    mine = [*(note.norm for note in notes), *(note.print for note in notes), *squares]
    if not mine:
        return
    everyone: Array = axis.comm.all_gather(np.array([mine], np.float64))
    norms, prints, sums = np.split(everyone, [len(notes), 2 * len(notes)], 1)
    start = f"{what} on rank {axis.rank} of {axis.comm.name}"
    problems = [_find_differing_note(axis, notes, norms, prints), _find_differing_weight(axis, names, sums, dtypes)]
    if any(problems):
        raise MismatchError(f"{start}: {'; and '.join(text for text in problems if text)}. {_NEEDED}")
    _check_parts(start, notes, norms, prints)


def _find_differing_note(axis: ParallelAxis, notes: Sequence[Note], norms: Array, prints: Array) -> str:
    """Return a description of the first tensor that differs; "" if none does."""
    finite: Array = np.isfinite(norms + prints).all(0)
    # Relative differences of gradients that are zero except for rounding are large: compare with the largest norm, too.
    largest = max((norms[:, at].max() for at, note in enumerate(notes) if note.is_gradient and finite[at]), default=0.0)
    for at, note in enumerate(notes):
        if note.is_part or not finite[at]:
            continue
        differences = np.abs(prints[:, at] - prints[0, at])
        by, tolerance = "", 0.0
        if not note.is_exact:
            least = largest / 100 if note.is_gradient else 0.0
            differences = np.maximum(differences, np.abs(norms[:, at] - norms[0, at])) / max(
                norms[:, at].max(), least, 1e-300
            )
            by, tolerance = (
                f", by {differences.max():.2g} of its norm",
                tolerance_of(note.dtype, has_codec=axis.codec is not None),
            )
        if differences.max() > tolerance:
            other = int(differences.argmax())
            return (
                "ranks have different values of a tensor that must be equal: "
                f"{note}, differs between rank 0 and rank {other}{by}"
            )
    return ""


def _check_parts(start: str, notes: Sequence[Note], norms: Array, prints: Array) -> None:
    """Raise MismatchError if every recorded shard of a sequence is the same on all ranks."""
    parts = [at for at, note in enumerate(notes) if note.is_part]
    if parts and norms[:, parts].any() and (prints[:, parts] == prints[:1, parts]).all():
        raise MismatchError(
            f"{start}: {notes[parts[0]]}, is the same on all ranks, like all other tensors sharded along the "
            f"sequence. Expected each rank's shard: {DIVIDE}"
        )


def _find_differing_weight(axis: ParallelAxis, names: Sequence[str], squares: Array, dtypes: Sequence[str]) -> str:
    """Return a description of the unsharded weight whose gradients differ most; "" if none do."""
    if (difference := worst_of(squares, dtypes, axis.codec is not None)) is None:
        return ""
    worst, least, most = difference
    norms = np.sqrt(squares[:, worst])
    return (
        "ranks have different gradients of an unsharded weight, which would diverge: the gradient of "
        f"{names[worst]} has norm {norms[least]:.3g} on rank {least} and {norms[most]:.3g} on rank {most}"
    )
