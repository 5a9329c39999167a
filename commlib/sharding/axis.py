"""ParallelAxis: the ranks among which a layer is sharded, and the encoding of tensors sent between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from commlib.buffers.freed_memory import keep_freed_memory
from commlib.compress.codec import Codec
from commlib.compress.registry import codec_of
from commlib.dtypes import FLOATS, name_of
from commlib.errors import UsageError
from commlib.group.overlap import cores_per_rank, overlap_pays
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.wires import EncodedWire, PlainWire, Wire


class ParallelAxis:
    """The ranks of sharded layers, and for floats a codec or None. Layers share one, and so do copies of a model.

    empty: allocates result arrays from a shape and a dtype. Making an axis is not collective.
    """

    def __init__(self, ranks: Ranks, codec: Codec | str | None = None, *, empty: Callable[..., Any] = np.empty):
        comm = communicator_of(ranks, type(self).__name__)
        keep_freed_memory()  # results are allocated in each step
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.codec = None if codec is None else codec_of(codec)
        self.empty = empty
        self._plain = PlainWire(comm)
        self._sharers: dict[int, ParallelAxis] = {}
        self._encoded = None if self.codec is None else EncodedWire(comm, self.codec)

    def wire(self, dtype: Any) -> Wire:
        """Return the wire for arrays of a dtype: floats are encoded if there is a codec, all other values are not."""
        return self._plain if self._encoded is None or name_of(dtype) not in FLOATS else self._encoded

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Send floats without a codec for a while, on all ranks."""
        encoded, self._encoded = self._encoded, None
        try:
            yield
        finally:
            self._encoded = encoded

    def sharers(self, copies: int) -> ParallelAxis:
        """Return the axis of the ranks that have the same shard of a weight. Collective once for each `copies`."""
        if copies not in self._sharers:
            name = f"{self.comm.name}, sharing"
            comm = self.comm.split(self.rank // copies, name=name)
            assert comm is not None
            self._sharers[copies] = ParallelAxis(comm, self.codec, empty=self.empty)
        return self._sharers[copies]

    @cached_property
    def overlaps(self) -> bool:
        """Whether reductions should overlap with computing: between nodes, or with spare cores. Collective once."""
        return self.size > 1 and overlap_pays(self.comm, threads=self.threads, cores=cores_per_rank(self.comm))

    @property
    def calls(self) -> int:
        """Number of collective calls of this process so far: on the axis, and in the world."""
        own = self.comm.group
        world = (group for group in list(self.comm.runtime.groups) if group.name == "world" and group is not own)
        return int(own.call_number + sum(group.call_number for group in world))

    threads = 1
    """Number of compute threads on this rank."""
    entered: Any = None
    """State of an adapter: the last input that entered sharded layers."""
    watch: Any = None
    """The `commlib.tensor_parallel.checks.axis_equality.AxisWatch` of the axis, if weights are sharded over it."""
    exchanges: Any = None
    """State of `commlib.expert`: the dispatchers over the axis."""

    def __deepcopy__(self, memo: Any) -> ParallelAxis:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a sharded model cannot be pickled: save the result of gather_state_dict(), in Keras of "
            "gather_model(), which any number of ranks can load"
        )

    def __repr__(self) -> str:
        codec = "" if self.codec is None else f", {self.codec.name}"
        return f"<Axis {self.comm.name}: rank {self.rank} of {self.size}{codec}>"


AxisRanks = Ranks | ParallelAxis
"""The ranks of an axis as users pass them: `Ranks` such as `mesh["tp"]`, or a ParallelAxis with a codec."""


def axis_of(ranks: AxisRanks, verb: str, *, empty: Callable[..., Any] = np.empty) -> ParallelAxis:
    """Return the axis over `ranks`, for a call of `verb`; empty: see ParallelAxis. Raises UsageError."""
    if isinstance(ranks, ParallelAxis):
        return ranks
    return ParallelAxis(communicator_of(ranks, verb), empty=empty)
