"""Axis: the ranks among which a layer is divided, and how tensors travel between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from commlib.buffers.freed_memory import keep_freed_memory
from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.compress.registry import codec_of
from commlib.dtypes import FLOATS, name_of
from commlib.errors import UsageError
from commlib.group.overlap import cores_per_rank, overlap_pays
from commlib.sharding.wires import Encoded, Plain, Wire


class Axis:
    """A communicator, and for floats a codec or None. Layers share one; copies of a model have the same.

    empty: makes the arrays of results, of a shape and a dtype. Making an axis is not collective.
    """

    def __init__(self, comm: Communicator, codec: Codec | str | None = None, *, empty: Callable[..., Any] = np.empty):
        if not isinstance(comm, Communicator):
            raise UsageError(f"expected the communicator of an axis, such as mesh['tp'], got {type(comm).__name__}")
        keep_freed_memory()  # results are made anew in each step
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.codec = None if codec is None else codec_of(codec)
        self.empty = empty
        self._plain = Plain(comm)
        self._sharers: dict[int, Axis] = {}
        self._encoded = None if self.codec is None else Encoded(comm, self.codec)

    def wire(self, dtype: Any) -> Wire:
        """Return how arrays of a dtype travel: floats encoded where there is a codec, all else as it is."""
        return self._plain if self._encoded is None or name_of(dtype) not in FLOATS else self._encoded

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Let floats travel as they are for a while, on all ranks."""
        encoded, self._encoded = self._encoded, None
        try:
            yield
        finally:
            self._encoded = encoded

    def sharers(self, copies: int) -> Axis:
        """Return the axis of the ranks that share a part of a weight with this one. Collective once for each."""
        if copies not in self._sharers:
            name = f"{self.comm.name}, sharing"
            comm = self.comm.split(self.rank // copies, name=name)
            assert comm is not None
            self._sharers[copies] = Axis(comm, self.codec, empty=self.empty)
        return self._sharers[copies]

    @cached_property
    def overlaps(self) -> bool:
        """Whether reductions should run beside computing: between nodes, or with cores to spare. Collective once."""
        return self.size > 1 and overlap_pays(self.comm, threads=self.threads, cores=cores_per_rank(self.comm))

    @property
    def calls(self) -> int:
        """How many calls this process has made so far that its ranks make together: on the axis, or in the world."""
        own = self.comm.group
        world = (group for group in list(self.comm.runtime.groups) if group.name == "world" and group is not own)
        return int(own.call_number + sum(group.call_number for group in world))

    threads = 1
    """How many threads compute on this rank."""
    entered: Any = None
    """What an adapter remembers of the last input that was moved into divided layers."""
    watch: Any = None
    """What `commlib.tensor_parallel.checks.alike` notes of what is divided among the ranks, if anything is."""
    exchanges: Any = None
    """What `commlib.expert` keeps of the ways between its ranks."""

    def __deepcopy__(self, memo: Any) -> Axis:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a model that is divided among ranks cannot be pickled: save what gather_state_dict() returns, in Keras "
            "gather_model(), which any number of ranks can load"
        )

    def __repr__(self) -> str:
        codec = "" if self.codec is None else f", {self.codec.name}"
        return f"<Axis {self.comm.name}: rank {self.rank} of {self.size}{codec}>"
