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

_Request = tuple[int, int, str]
"""Which group of some ranks a rank wants to be in (color), in which place (key), and the group's name."""


class Mesh:
    """Named axes over the ranks of a group, each with a Communicator: `mesh = Mesh(pp=2, dp=-1, tp=2)`, `mesh["tp"]`.

    The last axis is the fastest: its groups are neighbouring ranks, which a launcher puts on one node. One size may be
    -1 and is inferred. `mesh["dp", "tp"]` is the Communicator of a product of axes, whose last one is the fastest; it
    is made when first asked for, so that is collective over all ranks of the mesh, in the same order on all of them.

    Making a mesh is collective. comm: the group, by default all ranks (initialised if need be). Raises, on all ranks
    alike, UsageError for sizes that do not multiply up and MismatchError if the ranks ask for different meshes.
    """

    def __init__(self, *, comm: Communicator | None = None, **axes: int) -> None:
        base = init() if comm is None else _checked(comm)
        self._make(base, _agreed(base, lambda: MeshShape.of(axes, base.size)), None)

    def _make(self, comm: Communicator, shape: MeshShape, parent: Mesh | None) -> None:
        self.comm, self.shape = comm, shape
        self._parent, self._is_closed = parent, False
        self.kept: dict[Any, Any] = {}
        """What other parts of commlib have made for these axes."""
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

        Collective over all ranks of the mesh when a product is first asked for. Raises UsageError.
        """
        names = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if (group := self._groups.get(names)) is not None:
            return group
        self.shape.find(*names)
        self._check_open()
        if self._parent is not None and set(names) <= set(self._parent.shape.names):
            return self._parent[names]
        (made,) = self.comm.split_all([self._request(names)])
        assert made is not None
        self._keep(names, made)
        return made

    def _keep(self, axes: tuple[str, ...], group: Communicator) -> None:
        self._groups[axes] = group
        group.kept["mesh"] = self  # what is divided along it knows by that which ranks have the same parts

    def __contains__(self, axis: object) -> bool:
        """Return whether there is an axis of this name, former ones included."""
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
        """Return where this rank is along an axis, or in its group of a product of axes."""
        return self.shape.coordinate(self.comm.rank, *axes)

    def refactor(self, factors: Factors, /, **sizes: int) -> Mesh:
        """Return a mesh of the same ranks in which axes are factored anew: {"dp": {"edp": -1, "ep": 4}}.

        `{"dp": ("edp", "ep")}, ep=4` is the same, and {("dp", "tp"): ...} factors a product anew. The new mesh shares
        the communicators of this one, under their old names, and must not be used once this one is closed. Collective;
        raises what making a mesh does. See `MeshShape.refactor`.
        """
        self._check_open()
        mesh = Mesh.__new__(Mesh)
        mesh._make(self.comm, _agreed(self.comm, lambda: self.shape.refactor(factors, **sizes)), self)
        return mesh

    def picture(self) -> str:
        """Draw which rank is where, which axes stay inside a node, and which cross. Not collective."""
        return self.shape.picture(topology=self.comm.topology)

    def close(self) -> None:
        """Release the communicators that this mesh has made. Collective, when no rank uses them any more."""
        if not self._is_closed:
            self._is_closed = True
            self.comm.barrier()  # a rank that never comes is found here, where waits are watched
            for group in self._groups.values():
                group.close()
            self._groups.clear()
            self.kept.clear()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may not come: the groups are freed once all ranks have dropped them
            self._is_closed = True
            self._groups.clear()
            self.kept.clear()

    def __repr__(self) -> str:
        place = ", ".join(f"{name}={at}" for name, at in self.shape.coordinates(self.comm.rank).items())
        return f"<{self.shape} over {self.comm.name}: rank {self.comm.rank} at {place}>"


def _checked(comm: Communicator) -> Communicator:
    from commlib.communicator import Communicator

    if not isinstance(comm, Communicator):
        raise UsageError(f"Mesh: comm is {comm!r}, expected a commlib.Communicator; commlib.init(comm) makes one")
    return comm


def _agreed(comm: Communicator, make: Callable[[], MeshShape]) -> MeshShape:
    """Return the shape that all ranks have made. Raises on all ranks alike if one could not, or made another one."""
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
