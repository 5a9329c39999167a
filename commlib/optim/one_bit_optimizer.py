"""Drive a 1-bit optimizer for an adapter, which reads gradients, writes parameters and keeps the state.

    settings = OneBitSettings("OneBitAdam", freeze_step=100)    # wrong arguments are found here, before ranks meet
    optimizer = OneBitOptimizer(settings)
    optimizer.start(comm, counts)                               # collective
    optimizer.gradients[i][...] = ...                           # then, in each step
    optimizer.step(values, hypers, used)

The update itself is in `one_bit_adam` and `one_bit_lamb`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from commlib.communicator import Communicator
from commlib.compress.scheme import Scheme
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.optim.one_bit_adam import OneBitAdam
from commlib.optim.one_bit_lamb import Layer, Limits, OneBitLAMB
from commlib.optim.one_bit_moments import Hyper, Moments, check_phases


@dataclass(frozen=True, slots=True)
class OneBitSettings:
    """Settings of a 1-bit optimizer. Raises UsageError for those that make no sense.

    kind: the optimizer's name in errors. freeze_step: how many steps gradients travel in full. compress_within_node,
    variance_floor, scheme: see `Moments`. limits: those of 1-bit LAMB; None is 1-bit Adam.
    """

    kind: str
    freeze_step: int
    compress_within_node: bool = False
    variance_floor: float = 0.03
    scheme: Scheme | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_phases(self.kind, self.freeze_step, self.variance_floor)

    def check_dtype(self, dtype: str, label: str, allowed: Sequence[str] = ("float32",)) -> None:
        """Check the dtype of the parameter that errors call `label`. Raises UsageError."""
        if dtype not in allowed:
            raise UsageError(
                f"{self.kind}: parameters must be {', '.join(allowed)}, got {dtype} ({label}): moments are float32"
            )

    def make_update(self, comm: Communicator, counts: Sequence[int]) -> OneBitAdam | OneBitLAMB:
        """Make the update of parameters of so many elements. Collective; MismatchError where ranks differ."""
        moments = Moments(
            comm,
            [(str(number), count) for number, count in enumerate(counts)],
            self.freeze_step,
            scheme=self.scheme,
            floor=self.variance_floor,
            within_node=self.compress_within_node,
            what=self.kind,
        )
        return OneBitAdam(moments) if self.limits is None else OneBitLAMB(moments, self.limits)


class OneBitOptimizer:
    """Steps and state of a 1-bit optimizer, on float32 arrays of one dimension."""

    def __init__(self, settings: OneBitSettings) -> None:
        self.settings = settings
        self._started: OneBitAdam | OneBitLAMB | None = None
        self._loaded: dict[str, Any] = {}
        self._warned = False

    @property
    def is_started(self) -> bool:
        """Whether `start` was called; it is not before the first step."""
        return self._started is not None

    @property
    def _update(self) -> OneBitAdam | OneBitLAMB:
        assert self._started is not None, "start() comes first"
        return self._started

    def start(self, comm: Communicator, counts: Sequence[int]) -> None:
        """Make the moments of parameters of so many elements, and go on from what was loaded. Collective."""
        self._started = self.settings.make_update(comm, counts)
        self._adopt()

    @property
    def gradients(self) -> list[Array]:
        """Where this rank's gradients of a step are put, one for each parameter."""
        return [parameter.gradient for parameter in self._update.moments.parameters]

    @property
    def memory(self) -> list[list[Array]]:
        """The arrays that are remembered, one for each parameter: first moments, second ones, LAMB's fresh second ones.

        They are the memory itself: a caller that goes on from saved ones overwrites them.
        """
        update = self._update
        kinds = [[p.first for p in update.moments.parameters], [p.second for p in update.moments.parameters]]
        return kinds if self.settings.limits is None else [*kinds, [layer.fresh for layer in update.layers]]

    def read(self, arrays: Sequence[Array]) -> None:
        """Take over what `write` wrote: one array after another of `memory`, in any shape.

        For LAMB [parameters, 4] follow, the numbers of each parameter in the order of `Layer.scalars`.
        """
        for mine, array in zip(chain.from_iterable(self.memory), arrays, strict=False):
            mine[...] = array.reshape(-1)
        if self.settings.limits is not None:
            for layer, row in zip(self._update.layers, arrays[-1], strict=True):
                layer.load(dict(zip(layer.scalars(), row, strict=True)))

    def write(self, arrays: Sequence[Array]) -> None:
        """Write what is remembered, but for residuals, to arrays as `read` has them."""
        for mine, array in zip(chain.from_iterable(self.memory), arrays, strict=False):
            array[...] = mine.reshape(array.shape)
        if self.settings.limits is not None:
            for layer, row in zip(self._update.layers, arrays[-1], strict=True):
                row[...] = list(layer.scalars().values())

    def seek(self, steps: int) -> None:
        """Go on as after `steps` steps.

        Where that is not the number of steps taken, residuals are dropped: they belong to another run.
        """
        moments = self._update.moments
        if moments.steps != steps:
            moments.load(steps, {})

    def step(
        self, values: Sequence[Array], hypers: Sequence[Hyper], used: Sequence[bool], *, skip: bool = False
    ) -> bool:
        """Update `values`, the parameters, by the mean of all ranks' gradients. Collective.

        `used` says which of `gradients` were written; the others count as zeros. With `skip`, nothing changes on any
        rank if a gradient is not finite on some; returns False then. Warns, once, of gradients that came too late.
        """
        update = self._update
        moments = update.moments
        for number, (parameter, is_used) in enumerate(zip(moments.parameters, used, strict=True)):
            moments.used[number] = is_used
            if not is_used:
                parameter.gradient[...] = 0
        taken = update.step(values, hypers, skip=skip)
        if moments.came_late and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.settings.kind}: weights that had no gradient in the first {self.settings.freeze_step} steps "
                "have one now. They are not trained any more, because their second moment is zero: choose a larger "
                "freeze_step",
                stacklevel=5,  # the user's line, where an adapter's step() has a helper and its framework a wrapper
            )
        return taken

    def state(self) -> dict[str, Any]:
        """Return what belongs to no parameter: steps, LAMB's numbers, and this rank's residuals, by parameter."""
        if self._started is None:
            return self._loaded
        moments = self._started.moments
        place = {"rank": moments.comm.rank, "freeze_step": self.settings.freeze_step, "steps": moments.steps}
        state: dict[str, Any] = {**place, "residuals": moments.state()}
        if self.settings.limits is not None:
            state["layers"] = [layer.scalars() for layer in self._started.layers]
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError for the state of another optimizer, or of another freeze_step."""
        kind, freeze_step = self.settings.kind, self.settings.freeze_step
        if not state or ("layers" in state) != (self.settings.limits is not None):
            raise UsageError(f"this is no state of a {kind}")
        if state["freeze_step"] != freeze_step:
            raise UsageError(
                f"the state has freeze_step={state['freeze_step']}, this optimizer {freeze_step}: they must be equal"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; {} is the beginning.

        Residuals are taken over by the rank that had them only. The moments must be in `memory` before the next step.
        """
        self._loaded = dict(state)
        if self._started is not None:
            self._adopt()

    def _adopt(self) -> None:
        update, loaded = self._update, self._loaded
        is_mine = loaded.get("rank") == update.moments.comm.rank
        update.moments.load(loaded.get("steps", 0), loaded["residuals"] if is_mine else {})
        start = [Layer(0).scalars()] * len(update.layers)
        for layer, scalars in zip(update.layers, loaded.get("layers", start), strict=True):
            layer.load(scalars)
