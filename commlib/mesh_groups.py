"""Mesh: communicators for named axes over the ranks of a group, and for products of axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from commlib.errors import UsageError
from commlib.mesh import Factors, MeshShape
from commlib.world import init

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from commlib.ranks import Ranks

_Request = tuple[int, int, str]
"""A rank's group in a split (color), its order in the group (key), and the group's name."""


class Mesh:
    """Name axes over the ranks of a group, each with a Communicator.

    The last axis is the fastest: its groups are neighbouring ranks, which a launcher puts on one node. `mesh["tp"]` is
    the Communicator of an axis, `mesh["dp", "tp"]` that of a product of axes, whose last axis is the fastest. The first
    access to a product creates it, and is therefore collective over all ranks of the mesh, in the same order on all
    ranks. Making a mesh is collective.

    Args:
        ranks: The group: a communicator, a mesh or a process set; None: all ranks (`init` is called if needed).
        **axes: The sizes by name, slowest axis first; one may be -1 and is inferred.

    Raises:
        UsageError: If the product of the sizes is not the number of ranks, on all ranks.
        MismatchError: If the ranks give different meshes, on all ranks.

    Examples:
        >>> mesh = commlib.Mesh(dp=-1, tp=2)
        >>> mesh["tp"].size, mesh["dp"].size
        (2, 1)
        >>> mesh.close()
    """

    def __init__(self, *, ranks: Ranks | None = None, **axes: int) -> None:
        base = init() if ranks is None else _communicator_of(ranks)
        self._make(base, _agree_on_shape(base, lambda: MeshShape.of(axes, base.size)), None)

    def _make(self, comm: Communicator, shape: MeshShape, parent: Mesh | None) -> None:
        self.comm, self.shape = comm, shape
        self._parent, self._is_closed = parent, False
        self.cached: dict[Any, Any] = {}
        """Objects that other parts of commlib cache for these axes, by key."""
        new: list[tuple[str, ...]] = [
            (axis,) for axis in shape.axes if parent is None or axis not in parent.shape.names
        ]
        self._groups: dict[tuple[str, ...], Communicator] = {}
        for axes, group in zip(new, comm.split_all([self._request(axes) for axes in new]), strict=True):
            assert group is not None  # no color is negative
            self._keep(axes, group)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, slowest first."""
        return self.shape.axes

    def __getitem__(self, axes: str | tuple[str, ...]) -> Communicator:
        """Return the Communicator of this rank's group along an axis, or along a product of axes.

        The first access to a product is collective over all ranks of the mesh. Raises UsageError for an unknown axis.
        """
        names = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if (group := self._groups.get(names)) is not None:
            return group
        self.shape.find(*names)
        self._check_open()
        if self._parent is not None and set(names) <= set(self._parent.shape.names):
            return self._parent[names]
        (communicator,) = self.comm.split_all([self._request(names)])
        assert communicator is not None
        self._keep(names, communicator)
        return communicator

    def _keep(self, axes: tuple[str, ...], group: Communicator) -> None:
        self._groups[axes] = group
        group.cached["mesh"] = self  # sharded layers along this axis find the ranks with equal shards in the mesh

    def communicator(self, verb: str) -> Communicator:
        """Return the Communicator of a mesh with one axis. Raises UsageError for a call of `verb` if there are more.

        Args:
            verb: The requesting call, for errors.
        """
        if len(self.axes) > 1:
            from commlib.ranks import ranks_error

            raise ranks_error(verb, f"whole {self.shape}")
        return self[self.axes]

    def __contains__(self, axis: object) -> bool:
        """Return whether there is an axis of this name, including axes from before `refactor`."""
        return axis in self.shape.names

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the axes, slowest first."""
        return iter(self.axes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self.shape} over {self.comm.name} is closed: make another mesh")

    def _request(self, axes: tuple[str, ...]) -> _Request:
        color, key = self.shape.first(self.comm.rank, *axes), self.coordinate(*axes)
        return color, key, f"{self.comm.name}.{'*'.join(axes)}"

    def coordinate(self, *axes: str) -> int:
        """Return this rank's coordinate along an axis, or its rank in the group of a product of axes.

        Args:
            *axes: Names of axes.

        Examples:
            >>> commlib.Mesh(dp=1, tp=2).coordinate("tp") == comm.rank
            True
        """
        return self.shape.coordinate(self.comm.rank, *axes)

    def refactor(self, factors: Factors, /, **sizes: int) -> Mesh:
        """Return a mesh of the same ranks with some axes factored differently: {"dp": {"edp": -1, "ep": 4}}.

        `{"dp": ("edp", "ep")}, ep=4` is the same, and {("dp", "tp"): ...} factors a product of axes. The new mesh
        shares this mesh's communicators, under their old names; do not use it after this mesh is closed. Collective;
        raises the same errors as making a mesh. See `MeshShape.refactor`.

        Args:
            factors: By axis, or tuple of axes, its factors: names, or a mapping of names to sizes.
            **sizes: Sizes of factors that are only named.

        Examples:
            >>> experts = commlib.Mesh(dp=2).refactor({"dp": {"edp": -1, "ep": 2}})
            >>> experts["ep"].size
            2
        """
        self._check_open()
        mesh = Mesh.__new__(Mesh)
        mesh._make(self.comm, _agree_on_shape(self.comm, lambda: self.shape.refactor(factors, **sizes)), self)
        return mesh

    def picture(self) -> str:
        """Draw the ranks on their nodes, and which axes stay within a node or cross nodes. Not collective.

        Examples:
            >>> "tp" in commlib.Mesh(tp=2).picture()
            True
        """
        return self.shape.picture(topology=self.comm.topology)

    def close(self) -> None:
        """Release this mesh's communicators. Collective; call it when no rank uses them any more.

        Examples:
            >>> with commlib.Mesh(dp=2) as mesh:  # closes it at the end
            ...     mesh["dp"].size
            2
        """
        if not self._is_closed:
            self._is_closed = True
            self.comm.barrier()  # the watched wait here finds a rank that never arrives
            for group in self._groups.values():
                group.close()
            self._groups.clear()
            self.cached.clear()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may never arrive: the groups are freed once all ranks have dropped them
            self._is_closed = True
            self._groups.clear()
            self.cached.clear()

    def __repr__(self) -> str:
        place = ", ".join(f"{name}={at}" for name, at in self.shape.coordinates(self.comm.rank).items())
        return f"<{self.shape} over {self.comm.name}: rank {self.comm.rank} at {place}>"


def _communicator_of(ranks: Ranks) -> Communicator:
    from commlib.ranks import communicator_of  # imports numpy

    return communicator_of(ranks, "Mesh")


def _agree_on_shape(comm: Communicator, make: Callable[[], MeshShape]) -> MeshShape:
    """Make the shape on every rank and compare. Raises on all ranks if one of them failed or made another shape."""
    from commlib.group.call_check import mismatch

    shape, problem = None, None
    try:
        shape = make()
    except UsageError as error:
        problem = error
    texts = comm.all_gather_object(str(problem or shape))
    if len(set(texts)) > 1:
        raise mismatch(comm.name, comm.group.call_number, comm.rank, texts)
    if shape is None:
        assert problem is not None
        raise problem
    return shape
