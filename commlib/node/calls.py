"""The calls of one group whose ranks are all on one node: made once for each kind, and for each place in its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.group.operation import Operation, Result, describe
from commlib.kernels.host.node import arrays_are_where_expected
from commlib.node.call import SMALL_BYTES, Arithmetic, NodeCollective

if TYPE_CHECKING:
    from commlib.group.group import Group

# Calls of more kinds than this are not kept.
_MOST_TEMPLATES = 256

_ARRAYS_ARE_WHERE_EXPECTED = arrays_are_where_expected()


@dataclass(frozen=True, slots=True)
class VerbCall:
    """A verb on contiguous arrays of one kind: an exchange.

    offsets: bytes behind each rank's array to the part in it that this rank takes. shape: of a new result; () if the
    result is `x` itself.
    """

    path: NodeCalls
    call: NodeCollective
    offsets: Sequence[int]
    shape: tuple[int, ...]

    def operation(self, x: Array, target: Result | None, *, own: Array | None = None) -> Operation:
        """Return the operation that exchanges `x` into `target` (None: this rank gets nothing).

        `own` is what this rank publishes where `x` is not symmetric (default: `x`).
        """

        def run() -> Any:
            source = address_of(x if own is None else own)
            into = address_of(x if target is None else target.flat)
            placed = self.path.placed_exchange(self.call, x, source, into, self.offsets)
            if placed is None:
                self.call.run_at(source, into)
            else:
                placed.run()
            return None if target is None else target.deliver()

        return Operation(self.call.text, run, compares=True)


class NodeCalls:
    """The calls of one group whose ranks are all on one node: by kind, and those on symmetric memory by place."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._templates: dict[Hashable, NodeCollective] = {}
        self.small: dict[tuple[Any, int, str], NodeCollective] = {}
        """The all-reduces that `NodeCollective.between` may run, by (dtype, count, op)."""
        self.in_place: dict[tuple[int, int, Any, str], NodeCollective] = {}
        """Those of symmetric arrays that are reduced in place, by (address, count, dtype, op)."""
        self._symmetric: dict[tuple[NodeCollective, int, int], NodeCollective] = {}
        self._verbs: dict[Hashable, VerbCall] = {}

    def verb(
        self, key: Hashable, offsets: Sequence[int], shape: tuple[int, ...], make: Callable[[], NodeCollective]
    ) -> VerbCall:
        """Return the call of a verb, by which `plain` finds it from then on: key is (verb, dtype, shape, ...)."""
        found = self._verbs.get(key)
        if found is None:
            if len(self._verbs) >= _MOST_TEMPLATES:
                self._verbs.clear()
            found = self._verbs[key] = VerbCall(self, make().counted(), offsets, shape)
        return found

    def plain(self, key: Hashable, x: Array, out: Any) -> Array | None:
        """Run the verb on plain arrays, in this thread, and return the result; None if it was not called so before."""
        known = self._verbs.get(key)
        if known is None or not x.flags.c_contiguous:
            return None
        if out is None:
            out = np.empty(known.shape, x.dtype)
        elif out is x:
            if known.shape or not x.flags.carray:
                return None
        elif (
            type(out) is not np.ndarray
            or out.dtype is not x.dtype
            or out.shape != known.shape
            or not out.flags.carray
            or np.may_share_memory(x, out)
        ):
            return None
        placed = self.placed_exchange(known.call, x, address_of(x), address_of(out), known.offsets)
        if placed is not None:
            placed((x, out))
        else:
            known.call.at(x, out)
        return out  # type: ignore[no-any-return]

    def placed_exchange(
        self, call: NodeCollective, x: Array, source: int, into: int, offsets: Sequence[int]
    ) -> NodeCollective | None:
        """Return the exchange for symmetric `x`, made once for each place, or None for an ordinary one.

        What this rank takes begins `offsets[r]` bytes behind rank r's array; it depends on the call alone.
        """
        if x.nbytes <= SMALL_BYTES:
            return None
        key = (call, source, into)
        found = self._symmetric.get(key)
        if found is None:
            place = self._group.symmetric_place(x)
            if place is None:
                return None
            number, bases = place
            inputs = [base + offset for base, offset in zip(bases, offsets, strict=True)]
            if len(self._symmetric) >= _MOST_TEMPLATES:
                self.forget_places()
            found = self._symmetric[key] = call.on_symmetric(number, source, into, inputs)
        return found

    def template(self, key: Hashable, make: Callable[[], NodeCollective]) -> NodeCollective:
        """Return the template remembered under `key`, which says all that distinguishes calls; made if need be."""
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
                self.small.clear()
            found = self._templates[key] = make()
        return found

    def all_reduce(self, dtype: Any, count: int, op: str, algorithm: str) -> NodeCollective:
        """Return the template of an all-reduce. Raises UsageError for an operation that the dtype has not."""
        key = ("all_reduce", dtype, count, op, algorithm)
        found = self._templates.get(key)
        if found is not None:
            return found
        arithmetic = Arithmetic.of(dtype, op, self._group.size)
        text = describe("all_reduce", count, dtype, f"op={op}", f"algorithm={algorithm}")
        made = self.template(key, lambda: NodeCollective.all_reduce(self._group, text, count, arithmetic).counted())
        if made.can_begin and algorithm == "auto" and _ARRAYS_ARE_WHERE_EXPECTED:
            self.small[dtype, count, op] = made
        return made

    def bound_all_reduce(self, x: Array, target: Array, op: str, algorithm: str) -> NodeCollective:
        """Return an all-reduce of a contiguous array into another, or itself."""
        template = self.all_reduce(x.dtype, x.size, op, algorithm)
        placed = self._placed(template, x, target)
        return placed if placed is not template else template.bind(address_of(x), address_of(target))

    def plain_all_reduce(self, x: Any, op: str, out: Any) -> tuple[NodeCollective, Array] | None:
        """Return (the call for them, the result) for plain arrays of a kind that was reduced before, else None."""
        if type(x) is not np.ndarray or not x.flags.c_contiguous:
            return None
        template = self._templates.get(("all_reduce", x.dtype, x.size, op, "auto"))
        if template is None:
            return None
        if out is None:
            out = np.empty(x.shape, x.dtype)
        elif out is not x and (
            type(out) is not np.ndarray
            or out.dtype is not x.dtype
            or out.shape != x.shape
            or np.may_share_memory(x, out)
        ):
            return None
        if not out.flags.carray:
            return None
        call = self._placed(template, x, out)
        if out is x and call is not template:
            self.in_place[address_of(x), x.size, x.dtype, op] = call
        return call, out

    def _placed(self, template: NodeCollective, x: Array, target: Array) -> NodeCollective:
        """Return the call for symmetric arrays, made once for each place, or `template` for ordinary ones."""
        if x.nbytes <= SMALL_BYTES:
            return template
        source, into = address_of(x), address_of(target)
        key = (template, source, into)
        found = self._symmetric.get(key)
        if found is None:
            place, inputs, outputs = self._group.symmetric_places(x, target)
            if not place:
                return template
            if len(self._symmetric) >= _MOST_TEMPLATES:
                self.forget_places()
            found = self._symmetric[key] = template.on_symmetric(place, source, into, inputs, outputs)
        return found

    def forget_places(self) -> None:
        """Forget all symmetric arrays: memory is about to be released."""
        self._symmetric.clear()
        self.in_place.clear()

    def clear(self) -> None:
        """Forget all."""
        self.forget_places()
        self._verbs.clear()
        self.small.clear()
        self._templates.clear()
