"""Programs: run rounds of messages within a group's operations, and all-gather objects with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Hook, Posted, Region, do_nothing, execute
from commlib.group.gathering import gather_objects
from commlib.group.group_status import GroupStatus
from commlib.group.waits import Waits
from commlib.node.signature import signature
from commlib.observe.journal import Journal
from commlib.schedule.ir import Program
from commlib.transport.base import Transport


class Programs:
    """Runs programs of one group. node: the transport of this rank's node."""

    def __init__(
        self, transport: Transport, node: Transport, status: GroupStatus, waits: Waits, journal: Journal
    ) -> None:
        self._transport, self._node = transport, node
        self._status, self._waits, self._journal = status, waits, journal

    def execute(
        self,
        program: Program,
        blocks: Sequence[Sequence[Region]],
        text: str,
        reduce_op: ReduceFunction | None = None,
        *,
        part: int = 0,
        transport: Transport | None = None,
        before: Hook = do_nothing,
        after: Hook = do_nothing,
    ) -> None:
        """Run a program over blocks of the data, by messages of the group or of `transport`: see `streaming.execute`.

        `part` numbers the programs of one call.
        """
        execute(
            program,
            blocks,
            transport or self._transport,
            tag=self._status.history + signature(text) + part * 0x85EBCA6B,
            on_wait=self._waits.watch(text),
            reduce_op=reduce_op,
            before=before,
            after=after,
            posted=self.posted,
        )

    @property
    def posted(self) -> Posted | None:
        """A callback for each posted round of messages; None if the operation is not recorded."""
        record = self._journal.current
        if record is None:
            return None
        return lambda block, number: record.round(f"round {number + 1} of block {block + 1} posted")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, by messages, within an operation."""
        return gather_objects(value, self._transport, self.execute)

    def gather_in_node(self, value: Any) -> list[Any]:
        """Return the picklable objects of this node's ranks."""
        return gather_objects(value, self._node, self.execute)
