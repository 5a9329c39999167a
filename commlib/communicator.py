"""Communicator: a group of ranks and the verbs that they call together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, overload

from numpy import empty, generic, ndarray
from numpy.typing import NDArray

from commlib.buffers.views import are_plain
from commlib.collectives.call_table import Calls
from commlib.collectives.host import objects
from commlib.collectives.verbs.all_gather import all_gather
from commlib.collectives.verbs.all_gather_v import all_gather_v
from commlib.collectives.verbs.all_reduce import all_reduce
from commlib.collectives.verbs.all_to_all import all_to_all
from commlib.collectives.verbs.all_to_all_v import all_to_all_v, run_compiled
from commlib.collectives.verbs.barrier import barrier
from commlib.collectives.verbs.broadcast import broadcast
from commlib.collectives.verbs.gather import gather
from commlib.collectives.verbs.program import program
from commlib.collectives.verbs.reduce import reduce
from commlib.collectives.verbs.reduce_scatter import reduce_scatter, reduce_scatter_v
from commlib.collectives.verbs.scan import scan
from commlib.collectives.verbs.scatter import scatter
from commlib.config.settings import Config
from commlib.devices.arrays import device_named
from commlib.devices.host import HOST
from commlib.group import symmetric_array
from commlib.group.group import Group
from commlib.literals import AlgorithmName, Op, ScanOp
from commlib.observe.counters import Stats
from commlib.p2p import messages
from commlib.p2p.channels.channel import Channel
from commlib.p2p.channels.registry import Channels
from commlib.p2p.messenger import Messenger
from commlib.p2p.rendezvous import RendezvousOwner
from commlib.process import forks
from commlib.runtime.compiled_call import Plan
from commlib.runtime.process import Runtime
from commlib.runtime.work import Work
from commlib.subgroups import NodeAndRail, Subgroups
from commlib.topology import Topology
from commlib.transport.base import Transport

if TYPE_CHECKING:
    from commlib.p2p.channels.device_channel import DeviceChannel

ScalarT = TypeVar("ScalarT", bound=generic)
ArrayT = TypeVar("ArrayT", bound=Any)


class Communicator:
    """A group of ranks.

    The verbs are collective unless they name a peer: every rank of the group calls the same verbs with the same
    arguments in the same order. Arrays are numpy arrays, or anything on the host with the buffer protocol,
    `__array_interface__` or `__dlpack__`, or arrays of a device that is registered (`commlib.devices`), of any dtype in
    `commlib.dtypes`. `out=None` returns a new array, `out=x` works in place. Every verb has an `_async` twin: it
    returns a `Work` at once and runs on the progress thread, in launch order. Do not touch its arrays until the work is
    done.

    Every verb raises UsageError for a bad argument (before any data is sent), MismatchError on all ranks if their calls
    differ, PeerError if a rank is gone, StallError after COMMLIB_TIMEOUT, ShutdownError after `shutdown`.
    """

    def __init__(
        self, transport: Transport, runtime: Runtime, name: str = "world", *, group: Group | None = None
    ) -> None:
        self.group = Group(transport, runtime, name) if group is None else group
        self.rank, self.size, self.name = self.group.rank, self.group.size, self.group.name
        self._calls, letters = Calls(self.group), RendezvousOwner(self.group)
        self._channels, self._post = Channels(self.group, letters), Messenger(self.group, letters)
        for part in (self._channels, self._post, letters):  # the letters last: the others may still send some
            self.group.attach(part)
        self._all_reduces = self._calls.all_reduces
        self._subgroups = Subgroups(self.group, _of_group)
        self._barrier_plan: Plan | None = None
        self._labelled: dict[str, Communicator] = {}
        self.cached: dict[Any, Any] = {}
        """Objects that other parts of commlib cache for these ranks, by key."""

    def __repr__(self) -> str:
        closed = ", closed" if self.group.progress.is_closed else ""
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}{closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close it, unless an exception leaves the `with` block: then the other ranks may not close it."""
        if kind is None:
            self.close()

    @property
    def topology(self) -> Topology:
        """The ranks of the group by node."""
        return self.group.topology

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.group.one_node

    @property
    def native(self) -> Any:
        """The underlying mpi4py communicator, or None without MPI."""
        return self.group.native

    @property
    def runtime(self) -> Runtime:
        """The runtime that all communicators of this process share."""
        return self.group.runtime

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.group.config

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, some with several ranks that share memory."""
        return self.group.is_hierarchical

    # Groups

    @overload
    def split(self, color: Literal[-1], key: int = 0, *, name: str = "") -> None: ...
    @overload
    def split(self, color: int, key: int = 0, *, name: str = "") -> Communicator | Any: ...

    def split(self, color: int, key: int = 0, *, name: str = "") -> Communicator | None:
        """Return the communicator of the ranks with the same `color`, ordered by `key`, then by rank.

        A rank with a negative `color` takes part and gets None. A group costs no shared memory until its first
        collective.

        Args:
            color: The number of the new group, equal on its ranks; negative: join no group.
            key: The order of ranks in the new group; equal keys keep the order of ranks.
            name: The group's name in messages, the same on all ranks.

        Examples:
            >>> half = comm.split(comm.rank % 2, name="half")
            >>> half.size
            1
        """
        return self.split_all([(color, key, name)])[0]

    def split_all(self, requests: Sequence[tuple[int, int, str]]) -> list[Communicator | None]:
        """Make several splits in one collective call, each given as (color, key, name); return their communicators.

        Args:
            requests: (color, key, name) of each split: see `split`.

        Examples:
            >>> low, high = comm.split_all([(0, comm.rank, "low"), (0, -comm.rank, "high")])
            >>> low.rank == comm.rank and high.rank == 1 - comm.rank
            True
        """
        return self._subgroups.split(requests)

    def parts(self) -> NodeAndRail[Communicator]:
        """Return private communicators of this rank's node and rail. Not collective.

        Use them within an operation of this group (see `plan_program`), or while this group runs no other operation.
        """
        return self._subgroups.parts()

    def private(self) -> Communicator:
        """Return a communicator of the same ranks, for use within this group's operations (see `parts`)."""
        return self._subgroups.inner()

    def node(self) -> Communicator:
        """Return the communicator of the ranks of this group on this node (made by the first call).

        Examples:
            >>> comm.node().size <= comm.size
            True
        """
        return self if self.one_node else self._subgroups.node()

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: Any = HOST) -> Any:
        """Return a zeroed array in symmetric memory: memory that all ranks of the node map.

        Collective, with the same shape, dtype and kind of device on all ranks. A collective on such arrays needs no
        staging copies. A later call of `empty` frees the memory, once the arrays of all ranks are freed.

        Args:
            shape: The length, or the lengths of all dimensions.
            dtype: A numpy dtype or its name, one of `commlib.dtypes`.
            device: "host", "cuda" (this process' GPU), or a device (see `commlib.devices`).

        Examples:
            >>> x = comm.empty(3, "float64")
            >>> x[:] = comm.rank
            >>> comm.all_reduce(x, out=x)
            array([1., 1., 1.])
        """
        return self.group.run(symmetric_array.empty(self.group, shape, dtype, device))

    def labelled(self, label: str) -> Communicator:
        """Return these ranks' communicator with a label in the text of each array collective, except barriers.

        Not collective, and not another group: its calls keep their order with all others. A call with a label matches
        only calls with the same label: MismatchError otherwise. The label is for purposes that must not mix, such as
        the gradients of a backward.
        """
        result = self._labelled.get(label)
        if result is None:
            result = self._labelled[label] = copy.copy(self)
            result._calls = self._calls.labelled(label)
            result._all_reduces = result._calls.all_reduces
            result._labelled, result.cached = {}, {}
        return result

    def watch(self, text: str) -> Callable[[], None]:
        """Return a function to poll while this rank waits outside a collective; it raises to end the wait."""
        return self.group.waits.watch(text, ())

    def paths(self, device: Any = "cuda") -> tuple[AlgorithmName, ...]:
        """Return the names of the paths that can move a device's arrays, in order of preference.

        "node" or "hierarchical" (between the devices of a node), "nccl", "messages" (MPI on device memory), "host":
        pass one as `algorithm=` to select it. Sets up what the paths need. Collective, with the same device, or kind of
        device, on all ranks.

        Args:
            device: A kind of device, such as "cuda", or a device.

        Raises:
            UsageError: If this rank has no such device.

        Examples:
            >>> comm.paths("cuda")  # doctest: +SKIP
            ('node', 'nccl', 'host')
        """
        names = self._calls.open_paths(device_named(device, "paths") if isinstance(device, str) else device)
        return cast(tuple[AlgorithmName, ...], names)

    # Reductions

    @overload
    def all_reduce(
        self,
        x: NDArray[ScalarT],
        op: Op = "sum",
        *,
        out: NDArray[ScalarT] | None = None,
        algorithm: AlgorithmName = "auto",
    ) -> NDArray[ScalarT]: ...
    @overload
    def all_reduce(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any: ...

    def all_reduce(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any:
        """Return the sum over all ranks by default (Horovod's `allreduce` averages), the same bits on every rank.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            op: "sum", "mean", "min", "max" or "prod" (bool: sum and max are "or", prod and min "and"). Sums and
                products of integers wrap around, as in MPI. The mean of integers is exact even where their sum
                overflows, and truncates toward zero. float16 and bfloat16 are combined in float32 and rounded once, to
                nearest even.
            out: The array for the result, of the shape and dtype of `x`, or `x` itself; None: a new array.
            algorithm: "auto": the cheapest path or schedule; "node" (shared memory), "native" (MPI's own), "nccl"
                (between GPUs), or a schedule ("ring", "double_tree", ...).

        Examples:
            >>> comm.all_reduce(np.full(3, comm.rank + 1.0))
            array([3., 3., 3.])
            >>> comm.all_reduce(np.array([comm.rank]), "max")
            array([1])
        """
        if type(x) is ndarray:
            # Python's overhead dominates a small call: create no view, no string and no object here.
            known = self._all_reduces.get((x.dtype, x.size, op, algorithm))
            if known is not None and (x.flags.carray if out is x else are_plain(x, out)):
                return known.now(x, empty(x.shape, x.dtype) if out is None else out)
        elif out is not None and (prepared := self._calls.on_device(x, out, op, algorithm)) is not None:
            known, source, target = prepared
            known.now(source, target)
            return out
        return all_reduce(self._calls, x, op, out, algorithm).run()

    def all_reduce_async(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto") -> Work:
        """Start `all_reduce`."""
        if type(x) is ndarray:
            known = self._all_reduces.get((x.dtype, x.size, op, algorithm))
            if known is not None and are_plain(x, out):
                target = empty(x.shape, x.dtype) if out is None else out
                return known.start(x, target, value=target)
        return all_reduce(self._calls, x, op, out, algorithm).start()

    def plan_all_reduce(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto") -> Plan:
        """Prepare an `all_reduce` that will run many times on the same contiguous memory.

        `plan()` runs it now, `plan.start()` on the progress thread. Preparing is not collective; running is. The same
        holds for every `plan_*` below: x and out are as for the verb, and must be contiguous.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks. It must be contiguous.
            op: "sum", "mean", "min", "max" or "prod": see `all_reduce`.
            out: The contiguous array for the result, or `x` itself; None: one array for all runs.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> x = np.zeros(2)
            >>> plan = comm.plan_all_reduce(x, out=x)
            >>> for step in range(3):
            ...     x[:] = step + comm.rank
            ...     total = plan()
            >>> total
            array([5., 5.])
        """
        return all_reduce(self._calls, x, op, out, algorithm).plan("all_reduce")

    def plan_program(self, text: str, run: Callable[[], Any], *, on: Any = None) -> Plan:
        """Prepare a function that uses other groups, to run as one operation in this group's launch order.

        All ranks must give the same `text`. `run` may not use this group. on: an array that it works on. Its work on
        that array's device is ordered after the caller's earlier work on the current stream, and before later work.
        Preparing is not collective; running is.
        """
        return program(self._calls, text, run, on).plan("program")

    @overload
    def reduce_scatter(
        self,
        x: NDArray[ScalarT],
        op: Op = "sum",
        *,
        out: NDArray[ScalarT] | None = None,
        algorithm: AlgorithmName = "auto",
    ) -> NDArray[ScalarT]: ...
    @overload
    def reduce_scatter(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any: ...

    def reduce_scatter(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any:
        """Combine `x` of all ranks and give each rank its shard of the result along dimension 0.

        If the length of dimension 0 is not a multiple of the group's size, the first ranks get one row more.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            op: "sum", "mean", "min", "max" or "prod": see `all_reduce`.
            out: The array for this rank's rows; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> comm.reduce_scatter(np.ones((4, 2))).shape
            (2, 2)
        """
        if type(x) is ndarray:
            known = self._calls.plain("reduce_scatter", (x.dtype, x.shape, op, algorithm), x, out)
            if known is not None:
                return known
        return reduce_scatter(self._calls, x, op, out, algorithm).run()

    def reduce_scatter_async(
        self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Work:
        """Start `reduce_scatter`."""
        return reduce_scatter(self._calls, x, op, out, algorithm).start()

    def plan_reduce_scatter(
        self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Plan:
        """Prepare `reduce_scatter`."""
        return reduce_scatter(self._calls, x, op, out, algorithm).plan("reduce_scatter")

    @overload
    def reduce_scatter_v(
        self,
        x: NDArray[ScalarT],
        counts: Sequence[int],
        op: Op = "sum",
        *,
        out: NDArray[ScalarT] | None = None,
        algorithm: AlgorithmName = "auto",
    ) -> NDArray[ScalarT]: ...
    @overload
    def reduce_scatter_v(
        self, x: Any, counts: Sequence[int], op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Any: ...

    def reduce_scatter_v(
        self, x: Any, counts: Sequence[int], op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Any:
        """Combine `x` of all ranks and give rank i `counts[i]` rows of the result. All ranks give the same counts.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            counts: The number of rows for each rank, the same on all ranks; their sum is the length of dimension 0.
            op: "sum", "mean", "min", "max" or "prod": see `all_reduce`.
            out: The array for this rank's rows; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> len(comm.reduce_scatter_v(np.ones(4), [1, 3])) == [1, 3][comm.rank]
            True
        """
        return reduce_scatter_v(self._calls, x, counts, op, out, algorithm).run()

    def reduce_scatter_v_async(
        self, x: Any, counts: Sequence[int], op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Work:
        """Start `reduce_scatter_v`."""
        return reduce_scatter_v(self._calls, x, counts, op, out, algorithm).start()

    def plan_reduce_scatter_v(
        self, x: Any, counts: Sequence[int], op: Op = "sum", *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Plan:
        """Prepare `reduce_scatter_v`."""
        return reduce_scatter_v(self._calls, x, counts, op, out, algorithm).plan("reduce_scatter_v")

    @overload
    def reduce(
        self,
        x: NDArray[ScalarT],
        op: Op = "sum",
        root: int = 0,
        *,
        out: NDArray[ScalarT] | None = None,
        algorithm: AlgorithmName = "auto",
    ) -> NDArray[ScalarT] | None: ...
    @overload
    def reduce(
        self, x: Any, op: Op = "sum", root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Any: ...

    def reduce(
        self, x: Any, op: Op = "sum", root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Any:
        """Combine `x` of all ranks; rank `root` gets the result, the others None.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            op: "sum", "mean", "min", "max" or "prod": see `all_reduce`.
            root: The rank that gets the result.
            out: The array for the result on rank `root`; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> total = comm.reduce(np.ones(2), root=1)
            >>> (total is None) == (comm.rank == 0)
            True
        """
        return reduce(self._calls, x, op, root, out, algorithm).run()

    def reduce_async(
        self, x: Any, op: Op = "sum", root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Work:
        """Start `reduce`."""
        return reduce(self._calls, x, op, root, out, algorithm).start()

    def plan_reduce(
        self, x: Any, op: Op = "sum", root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Plan:
        """Prepare `reduce`."""
        return reduce(self._calls, x, op, root, out, algorithm).plan("reduce")

    @overload
    def scan(
        self, x: NDArray[ScalarT], op: ScanOp = "sum", *, out: NDArray[ScalarT] | None = None
    ) -> NDArray[ScalarT]: ...
    @overload
    def scan(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Any: ...

    def scan(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Any:
        """Combine `x` of all ranks up to and including this one.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            op: "sum", "min", "max" or "prod": see `all_reduce`.
            out: The array for the result, of the shape and dtype of `x`; None: a new array.

        Examples:
            >>> int(comm.scan(np.array([10]))[0]) == 10 * (comm.rank + 1)
            True
        """
        return scan(self._calls, "scan", x, op, out).run()

    def scan_async(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Work:
        """Start `scan`."""
        return scan(self._calls, "scan", x, op, out).start()

    def plan_scan(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Plan:
        """Prepare `scan`."""
        return scan(self._calls, "scan", x, op, out).plan("scan")

    @overload
    def exscan(
        self, x: NDArray[ScalarT], op: ScanOp = "sum", *, out: NDArray[ScalarT] | None = None
    ) -> NDArray[ScalarT] | None: ...
    @overload
    def exscan(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Any: ...

    def exscan(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Any:
        """Combine `x` of all ranks before this one; rank 0 gets None, and its `out` is unchanged.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            op: "sum", "min", "max" or "prod": see `all_reduce`.
            out: The array for the result, of the shape and dtype of `x`; None: a new array. Unchanged on rank 0.

        Examples:
            >>> before = comm.exscan(np.array([10]))
            >>> before is None if comm.rank == 0 else int(before[0]) == 10
            True
        """
        return scan(self._calls, "exscan", x, op, out).run()

    def exscan_async(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Work:
        """Start `exscan`."""
        return scan(self._calls, "exscan", x, op, out).start()

    def plan_exscan(self, x: Any, op: ScanOp = "sum", *, out: Any = None) -> Plan:
        """Prepare `exscan`."""
        return scan(self._calls, "exscan", x, op, out).plan("exscan")

    # Movement

    def broadcast(self, x: ArrayT, root: int = 0, *, algorithm: AlgorithmName = "auto") -> ArrayT:
        """Overwrite `x` on all ranks with rank `root`'s `x`, and return it.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks. Overwritten on all
                ranks but `root`.
            root: The rank whose `x` the others get.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> comm.broadcast(np.full(2, comm.rank), root=1)
            array([1, 1])
        """
        if type(x) is ndarray and type(root) is int:
            known: Any = self._calls.plain("broadcast", (x.dtype, x.shape, root, algorithm), x, x)
            if known is not None:
                return known  # type: ignore[no-any-return]
        return broadcast(self._calls, x, root, algorithm).run()  # type: ignore[no-any-return]

    def broadcast_async(self, x: Any, root: int = 0, *, algorithm: AlgorithmName = "auto") -> Work:
        """Start `broadcast`."""
        return broadcast(self._calls, x, root, algorithm).start()

    def plan_broadcast(self, x: Any, root: int = 0, *, algorithm: AlgorithmName = "auto") -> Plan:
        """Prepare `broadcast`."""
        return broadcast(self._calls, x, root, algorithm).plan("broadcast")

    @overload
    def all_gather(
        self, x: NDArray[ScalarT], *, out: NDArray[ScalarT] | None = None, algorithm: AlgorithmName = "auto"
    ) -> NDArray[ScalarT]: ...
    @overload
    def all_gather(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any: ...

    def all_gather(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any:
        """Concatenate `x` of all ranks along dimension 0, in rank order. Shapes must agree.

        Args:
            x: An array of the same shape and dtype on all ranks; without dimensions it counts as one element.
            out: The array for the result: its dimension 0 is `size` times as long; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> comm.all_gather(np.array([comm.rank, 7]))
            array([0, 7, 1, 7])
        """
        if type(x) is ndarray:
            known = self._calls.plain("all_gather", (x.dtype, x.shape, algorithm), x, out)
            if known is not None:
                return known
        return all_gather(self._calls, x, out, algorithm).run()

    def all_gather_async(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Work:
        """Start `all_gather`."""
        return all_gather(self._calls, x, out, algorithm).start()

    def plan_all_gather(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Plan:
        """Prepare `all_gather`."""
        return all_gather(self._calls, x, out, algorithm).plan("all_gather")

    @overload
    def all_gather_v(self, x: NDArray[ScalarT]) -> NDArray[ScalarT]: ...
    @overload
    def all_gather_v(self, x: Any) -> Any: ...

    def all_gather_v(self, x: Any) -> Any:
        """Concatenate `x` of all ranks along dimension 0, in rank order. The lengths of dimension 0 may differ.

        Args:
            x: An array of the same dtype on all ranks; the lengths of dimension 0 may differ, the others not.

        Examples:
            >>> comm.all_gather_v(np.full(comm.rank + 1, comm.rank))
            array([0, 1, 1])
        """
        return all_gather_v(self._calls, x).run()

    def all_gather_v_async(self, x: Any) -> Work:
        """Start `all_gather_v`."""
        return all_gather_v(self._calls, x).start()

    def plan_all_gather_v(self, x: Any) -> Plan:
        """Prepare `all_gather_v`."""
        return all_gather_v(self._calls, x).plan("all_gather_v")

    @overload
    def gather(
        self,
        x: NDArray[ScalarT],
        root: int = 0,
        *,
        out: NDArray[ScalarT] | None = None,
        algorithm: AlgorithmName = "auto",
    ) -> NDArray[ScalarT] | None: ...
    @overload
    def gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any: ...

    def gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any:
        """Concatenate `x` of all ranks along dimension 0 on rank `root`; the others get None.

        Args:
            x: An array of a dtype in `commlib.dtypes`, of the same shape and dtype on all ranks.
            root: The rank that gets the result.
            out: The array for the result on rank `root`; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> rows = comm.gather(np.array([comm.rank]))
            >>> rows is None if comm.rank else rows.tolist() == [0, 1]
            True
        """
        return gather(self._calls, x, root, out, algorithm).run()

    def gather_async(self, x: Any, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Work:
        """Start `gather`."""
        return gather(self._calls, x, root, out, algorithm).start()

    def plan_gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Plan:
        """Prepare `gather`."""
        return gather(self._calls, x, root, out, algorithm).plan("gather")

    @overload
    def scatter(
        self,
        x: NDArray[ScalarT],
        root: int = 0,
        *,
        out: NDArray[ScalarT] | None = None,
        algorithm: AlgorithmName = "auto",
    ) -> NDArray[ScalarT]: ...
    @overload
    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any: ...

    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any:
        """Return this rank's equal share of rank `root`'s `x` along dimension 0. The other ranks' `x` is ignored.

        Args:
            x: On rank `root` the array whose dimension 0 is shared out equally; ignored on the others.
            root: The rank whose `x` is shared out.
            out: The array for this rank's rows; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> own = comm.scatter(np.arange(4) if comm.rank == 0 else None)
            >>> own.tolist() == [[0, 1], [2, 3]][comm.rank]
            True
        """
        return scatter(self._calls, x, root, out, algorithm).run()

    def scatter_async(
        self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto"
    ) -> Work:
        """Start `scatter`."""
        return scatter(self._calls, x, root, out, algorithm).start()

    def plan_scatter(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Plan:
        """Prepare `scatter`."""
        return scatter(self._calls, x, root, out, algorithm).plan("scatter")

    @overload
    def all_to_all(
        self, x: NDArray[ScalarT], *, out: NDArray[ScalarT] | None = None, algorithm: AlgorithmName = "auto"
    ) -> NDArray[ScalarT]: ...
    @overload
    def all_to_all(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any: ...

    def all_to_all(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Any:
        """Split `x` along dimension 0 into `size` equal blocks, send block i to rank i; return the received blocks.

        Args:
            x: An array of the same shape and dtype on all ranks; `size` divides the length of dimension 0.
            out: The array for the result, of the shape and dtype of `x`; None: a new array.
            algorithm: "auto": the cheapest path or schedule; or the name of one: see `all_reduce`.

        Examples:
            >>> received = comm.all_to_all(np.array([10 * comm.rank, 10 * comm.rank + 1]))
            >>> received.tolist() == [comm.rank, 10 + comm.rank]
            True
        """
        if type(x) is ndarray:
            known = self._calls.plain("all_to_all", (x.dtype, x.shape, algorithm), x, out)
            if known is not None:
                return known
        return all_to_all(self._calls, x, out, algorithm).run()

    def all_to_all_async(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Work:
        """Start `all_to_all`."""
        return all_to_all(self._calls, x, out, algorithm).start()

    def plan_all_to_all(self, x: Any, *, out: Any = None, algorithm: AlgorithmName = "auto") -> Plan:
        """Prepare `all_to_all`."""
        return all_to_all(self._calls, x, out, algorithm).plan("all_to_all")

    def all_to_all_v(
        self, x: Any, splits: Sequence[int], *, takes: Sequence[int] | None = None, out: Any = None
    ) -> Any:
        """Send `splits[i]` rows of `x` to rank i; return (the received rows, int64 row counts by source rank).

        Fastest on a node where `x` or `out` is in symmetric memory (`empty`) on all ranks, at any offset.

        Args:
            x: An array; its rows go to the ranks in rank order.
            splits: The number of rows for each rank.
            takes: The number of rows to receive from each rank, if all ranks know it. The ranks then do not exchange
                the counts but check them: MismatchError on ranks that disagree; between nodes only on the receiving
                ranks.
            out: The array for the received rows, with exactly that many rows; None: a new array. Without `takes` the
                number is known only when the counts arrive.

        Raises:
            UsageError: If `out` has another number of rows, on this rank.

        Examples:
            >>> rows, counts = comm.all_to_all_v(np.arange(3), [2, 1])
            >>> counts.tolist() == [[2, 2], [1, 1]][comm.rank]
            True
        """
        if type(x) is ndarray:
            done = run_compiled(self._calls, x, splits, takes, out)
            if done is not None:
                return done
        return all_to_all_v(self._calls, x, splits, takes, out).run()

    def all_to_all_v_async(
        self, x: Any, splits: Sequence[int], *, takes: Sequence[int] | None = None, out: Any = None
    ) -> Work:
        """Start `all_to_all_v`."""
        return all_to_all_v(self._calls, x, splits, takes, out).start()

    def plan_all_to_all_v(
        self, x: Any, splits: Sequence[int], *, takes: Sequence[int] | None = None, out: Any = None
    ) -> Plan:
        """Prepare `all_to_all_v`. With `takes`, its result is always the same memory."""
        return all_to_all_v(self._calls, x, splits, takes, out).plan()

    # Point-to-point messages. They match by (peer, tag), in order, and do not queue behind collectives.

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send `x` to rank `peer`. Returns when `x` may be changed, possibly before the peer has received it.

        Args:
            x: An array of any shape.
            peer: The rank that receives.
            tag: A number that matches sends and receives; messages with equal tags keep their order.

        Examples:
            >>> if comm.rank == 0:
            ...     comm.send(np.arange(3), 1)
            ... else:
            ...     assert comm.recv(np.zeros(3, int), 0).tolist() == [0, 1, 2]
        """
        if not self._post.send_now(x, peer, tag):
            messages.send(self.group, self._post, x, peer, tag).complete()

    def send_async(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Start `send`."""
        return messages.send(self.group, self._post, x, peer, tag).start()

    def recv(self, x: ArrayT, peer: int, tag: int = 0) -> ArrayT:
        """Receive a message from rank `peer` with this tag into `x`, and return `x`. The byte counts must agree.

        Args:
            x: The array that is overwritten, of as many bytes as the message.
            peer: The rank that sends.
            tag: A number that matches sends and receives; messages with equal tags keep their order.

        Examples:
            >>> if comm.rank == 0:
            ...     comm.send(np.ones(2), 1, tag=5)
            ... else:
            ...     assert comm.recv(np.zeros(2), 0, tag=5).tolist() == [1.0, 1.0]
        """
        if self._post.recv_now(x, peer, tag):
            return x
        return messages.recv(self.group, self._post, x, peer, tag).complete()  # type: ignore[no-any-return]

    def recv_async(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Start `recv`."""
        return messages.recv(self.group, self._post, x, peer, tag).start()

    def send_recv(self, x: Any, peer: int, out: ArrayT, source: int, tag: int = 0) -> ArrayT:
        """Send `x` to rank `peer` while receiving into `out` from rank `source`; return `out`.

        Args:
            x: The array to send, of any shape.
            peer: The rank that receives `x`.
            out: The array that is overwritten, of as many bytes as the received message.
            source: The rank whose message is received.
            tag: A number that matches sends and receives; messages with equal tags keep their order.

        Examples:
            >>> other = 1 - comm.rank
            >>> comm.send_recv(np.array([comm.rank]), other, np.zeros(1, int), other).tolist() == [other]
            True
        """
        return messages.exchange(self.group, self._post, x, peer, out, source, tag)  # type: ignore[no-any-return]

    def send_recv_async(self, x: Any, peer: int, out: Any, source: int, tag: int = 0) -> Work:
        """Start `send_recv`."""
        return messages.send_recv(self.group, self._post, x, peer, out, source, tag).start()

    @overload
    def channel(
        self,
        peer: int,
        edge: int | str,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        depth: int = 2,
        *,
        codec: Any = None,
        device: None = None,
    ) -> Channel: ...

    @overload
    def channel(
        self,
        peer: int,
        edge: int | str,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        depth: int = 2,
        *,
        codec: Any = None,
        device: Any,
    ) -> DeviceChannel: ...

    def channel(
        self,
        peer: int,
        edge: int | str,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        depth: int = 2,
        *,
        codec: Any = None,
        device: Any = None,
    ) -> Any:
        """Open an edge to rank `peer`, which opens it too: arrays then go in both directions, in order.

        Not collective: it involves two ranks and does not block. Both sides give the same shape, dtype, depth, codec
        and kind of device. On a node the sender writes into the receiver's memory, and `recv` returns a view of it (see
        `Channel`).

        Args:
            peer: The other rank of the edge.
            edge: A number or a name that distinguishes several edges between the same two ranks.
            shape: The lengths of the first message; later messages may have other shapes.
            dtype: The dtype of all messages.
            depth: The number of messages that each direction holds.
            codec: None, a name ("int8") or a codec of fixed length, for floats.
            device: None: host arrays (see `Channel`); "cuda" or a device (see `commlib.devices`): arrays on it on both
                sides (see `DeviceChannel`).

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "pair", 4)
            >>> edge.send(np.full(4, comm.rank, np.float32))
            >>> view = edge.recv()
            >>> float(view[0]) == 1 - comm.rank
            True
            >>> edge.release(view)
        """
        if codec is not None:
            from commlib.compress.registry import codec_of  # few need it

            codec = codec_of(codec)
        if isinstance(device, str):
            device = device_named("" if device == HOST.name else device, "channel")
        return self._channels.open(peer, edge, shape, dtype, depth, codec, None if device is HOST else device)

    # Synchronisation and objects

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`.

        Examples:
            >>> comm.barrier()
        """
        if self._barrier_plan is not None:
            self._barrier_plan()
        else:
            barrier(self._calls).run()
            self._barrier_plan = self.plan_barrier()  # now that the group has its shared memory

    def barrier_async(self) -> Work:
        """Start `barrier`; the work is done when all ranks have called it."""
        return barrier(self._calls).start()

    def plan_barrier(self) -> Plan:
        """Prepare `barrier`."""
        return barrier(self._calls).plan("barrier")

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s picklable object on all ranks. Unpickling runs code: trust your ranks.

        Args:
            value: A picklable object; used on rank `root` only.
            root: The rank whose object the others get.

        Examples:
            >>> comm.broadcast_object({"rank": comm.rank}, root=1)
            {'rank': 1}
        """
        return self.group.run(objects.broadcast_object(self.group, value, root))

    def broadcast_object_async(self, value: Any, root: int = 0) -> Work:
        """Start `broadcast_object`."""
        return self.group.start(objects.broadcast_object(self.group, value, root))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order. Unpickling runs code: trust your ranks.

        Args:
            value: A picklable object.

        Examples:
            >>> comm.all_gather_object(f"rank {comm.rank}")
            ['rank 0', 'rank 1']
        """
        return self.group.run(objects.all_gather_object(self.group, value))  # type: ignore[no-any-return]

    def all_gather_object_async(self, value: Any) -> Work:
        """Start `all_gather_object`."""
        return self.group.start(objects.all_gather_object(self.group, value))

    def stats(self) -> Stats:
        """Return this rank's call counters of this group by verb, since counting started.

        Each counter has calls, failed calls, bytes, seconds, seconds in the queue, and seconds that the caller waited
        (`commlib.observe.Count`).

        Raises:
            UsageError: If nothing was counted: call `commlib.metrics.start` or `commlib.start_recording` first.

        Examples:
            >>> commlib.start_recording()
            >>> total = comm.all_reduce(np.ones(2))
            >>> comm.stats()["all_reduce"].calls >= 1
            True
            >>> commlib.stop_recording()
        """
        return self.runtime.recording.counters().stats(self.group.name)

    def close(self) -> None:
        """Release all resources. Collective; call it when no rank uses the communicator any more.

        Examples:
            >>> group = comm.split(0)
            >>> group.close()
        """
        forks.check(f"close of {self.name}")
        self._subgroups.close()
        self._calls.clear()
        for labelled in self._labelled.values():
            labelled._calls.clear()
        self.group.close()


def _of_group(group: Group) -> Communicator:
    return Communicator(group.transport, group.runtime, group=group)
