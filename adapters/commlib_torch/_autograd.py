"""Autograd hooks for reductions: notice when a gradient is ready, and when a backward pass ends."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from commlib.errors import UsageError
from commlib.sharding.shards import world_ranks


class Listener(Protocol):
    """Gets a call for each gradient, with the index of its parameter."""

    def on_gradient(self, index: int) -> None: ...

    def before_gradient(self, index: int) -> None: ...


def listen(listener: Listener, parameters: Sequence[Tensor], *, before: Collection[int]) -> list[Any]:
    """Call `on_gradient` after each gradient accumulation, and `before_gradient` before it for the indices in `before`.

    Returns handles that remove the hooks. A parameter does not keep its listener alive.
    """
    reference = weakref.ref(listener)

    def hook(method: str, index: int) -> Callable[[Tensor], None]:
        call = getattr(type(listener), method)

        def on_hook(_: Tensor) -> None:
            listener = reference()
            if listener is not None:
                call(listener, index)

        return on_hook

    handles: list[Any] = []
    for index, parameter in enumerate(parameters):
        handles.append(parameter.register_post_accumulate_grad_hook(hook("on_gradient", index)))
        if index in before:
            handles.append(parameter.register_hook(hook("before_gradient", index)))
    return handles


class Member(Protocol):
    """Participates in backward passes."""

    serial: int

    def end_backward(self) -> None: ...


class BackwardPasses:
    """Calls `end_backward` of every member at the end of each backward in which `arm` was called.

    Members are called in the order of their construction, which is the same on every rank. Backward may reach them in
    another order on each rank; that order would let one rank wait in one reducer while another waits in a second one.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._serials = itertools.count()
        self._armed: set[int] = set()
        self._is_one = False  # within `as_one`
        self.pipeline: tuple[Any, nn.Module] | None = None
        """The communicator and the stages of this rank, within `as_one`."""
        self.started: list[Any] = []
        """Members shared by several ranks of the pipeline whose gradients this rank's step has produced."""
        self._is_final, self._later = True, frozenset[int]()

    def join(self, member: Member) -> int:
        """Add a member; return its position in the order."""
        self._members.add(member)
        return next(self._serials)

    def leave(self, member: Member) -> None:
        """Remove a member."""
        self._members.discard(member)

    @property
    def members(self) -> list[Any]:
        """The members, in order."""
        return sorted(self._members, key=lambda member: member.serial)

    def arm(self) -> None:
        """Request a callback at the end of the running backward pass. Must be called within backward."""
        if self._is_one:
            return
        graph = torch._C._current_graph_task_id()
        if graph in self._armed:
            return
        _refuse_compiled()
        self._armed.add(graph)
        Variable._execution_engine.queue_callback(self._end)

    @contextmanager
    def as_one(self, comm: Any, stages: nn.Module) -> Iterator[None]:
        """Treat all backwards within the context as one, such as those of a pipeline's microbatches; it ends with it.

        comm: the ranks that run it together. stages: this rank's stages. Members that several of these ranks share
        continue to `end_shared`, because their gradients may exist on some ranks only.
        """
        self._is_one, self.pipeline = True, (comm, stages)
        try:
            yield
        finally:
            self._is_one, self.pipeline = False, None
        for member in self.members:
            if member not in self.started:
                member.end_backward()

    @contextmanager
    def shared(self, comm: Any) -> Iterator[None]:
        """Run a pipeline step; if it fails, members that several of its ranks share abandon their passes."""
        self.started = []
        try:
            yield
        except BaseException:
            for member in self.members:
                if member.is_shared(comm):  # on all ranks, even where it has not begun: the pass counts must agree
                    member.reducer.abandon()
            raise
        finally:
            self.started = []

    def end_shared(self, comm: Any) -> None:
        """End the backward of all members that have begun on any rank of the pipeline, on all of its ranks. Collective.

        Raises UsageError on all ranks of the pipeline if one of them has closed such a member.
        """
        begun = {member.label for member in self.started}
        own = {member.label: member for member in self.members if member.is_shared(comm)}
        reports = comm.all_gather_object((begun, set(own)))
        for label in sorted(set().union(*(theirs for theirs, _ in reports))):
            places = zip(world_ranks(comm), reports, strict=True)
            if lacking := [rank for rank, (_, has) in places if rank in label[0] and label not in has]:
                raise UsageError(
                    f"a step of a pipeline has produced gradients that ranks {list(label[0])} reduce together, but "
                    f"ranks {lacking} have closed the optimizer of their layers: close it on all ranks or on none"
                )
            if label in own:
                own[label].end_together()

    @contextmanager
    def part(self, *, final: bool, later: frozenset[int] = frozenset()) -> Iterator[None]:
        """Run a backward that completes gradients if it is the `final` one, except those of `later` (ids)."""
        self._is_final, self._later = final, later
        try:
            yield
        finally:
            self._is_final, self._later = True, frozenset()

    def completes(self, parameter: Tensor) -> bool:
        """Return whether a gradient produced now is complete, or will be added to."""
        return self._is_final and id(parameter) not in self._later

    def _end(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:
            # Not the end yet: re-entrant checkpointing runs a backward within a node of an outer one.
            node.register_hook(lambda *_: self.arm())
            return
        self._armed.clear()
        for member in self.members:
            member.end_backward()


def _refuse_compiled() -> None:
    """Raise UsageError if compiled autograd runs the backward: it reports no end of backward."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise UsageError(
            "compiled autograd does not report the end of a backward, so gradients cannot be reduced: leave "
            "torch._dynamo.config.compiled_autograd off; torch.compile of the model or of the whole step works"
        )


backward_passes = BackwardPasses()
"""One per process, like autograd's engine."""
