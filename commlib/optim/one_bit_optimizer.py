"""OneBitOptimizer: run a 1-bit optimizer for an adapter, which reads gradients, writes parameters and saves the state.

    settings = OneBitSettings("OneBitAdam", freeze_step=100)    # raises for invalid arguments, before any communication
    optimizer = OneBitOptimizer(settings)
    optimizer.start(comm, counts)                               # collective
    optimizer.gradients[i][...] = ...                           # in each step
    optimizer.step(values, hypers, used)

`one_bit_adam` and `one_bit_lamb` contain the updates.
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
from commlib.optim.one_bit_lamb import CoefficientLimits, LayerState, OneBitLAMB
from commlib.optim.one_bit_moments import Hyperparameters, Moments, check_phases


@dataclass(frozen=True, slots=True)
class OneBitSettings:
    """Settings of a 1-bit optimizer. Raises UsageError for invalid values.

    kind: the optimizer's name in errors. freeze_step: the number of steps with full-precision gradients.
    compress_within_node, variance_floor, scheme: see `Moments`. limits: the limits of 1-bit LAMB; None is 1-bit Adam.
    """

    kind: str
    freeze_step: int
    compress_within_node: bool = False
    variance_floor: float = 0.03
    scheme: Scheme | None = None
    limits: CoefficientLimits | None = None

    def __post_init__(self) -> None:
        check_phases(self.kind, self.freeze_step, self.variance_floor)

    def check_dtype(self, dtype: str, label: str, allowed: Sequence[str] = ("float32",)) -> None:
        """Check the dtype of the parameter that errors call `label`. Raises UsageError for other dtypes."""
        if dtype not in allowed:
            raise UsageError(
                f"{self.kind}: parameters must be {', '.join(allowed)}, because moments are float32; got {dtype} "
                f"({label})"
            )

    def make_update(self, comm: Communicator, counts: Sequence[int]) -> OneBitAdam | OneBitLAMB:
        """Make the update of parameters with these element counts. Collective. Raises MismatchError if ranks differ."""
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
    """Steps and state of a 1-bit optimizer, on 1-D float32 arrays."""

    def __init__(self, settings: OneBitSettings) -> None:
        self.settings = settings
        self._started: OneBitAdam | OneBitLAMB | None = None
        self._loaded: dict[str, Any] = {}
        self._warned = False

    @property
    def is_started(self) -> bool:
        """Whether `start` was called. It is called before the first step."""
        return self._started is not None

    @property
    def _update(self) -> OneBitAdam | OneBitLAMB:
        assert self._started is not None, "call start() first"
        return self._started

    def start(self, comm: Communicator, counts: Sequence[int]) -> None:
        """Allocate the moments of parameters with these element counts, and resume from a loaded state. Collective."""
        self._started = self.settings.make_update(comm, counts)
        self._adopt()

    @property
    def gradients(self) -> list[Array]:
        """The arrays for this rank's gradients of a step, one per parameter."""
        return [parameter.gradient for parameter in self._update.moments.parameters]

    @property
    def memory(self) -> list[list[Array]]:
        """The state arrays, one per parameter: first moments, second moments, and LAMB's unfrozen second moments.

        These are the actual arrays: a caller that resumes from a checkpoint overwrites them.
        """
        update = self._update
        kinds = [[p.first for p in update.moments.parameters], [p.second for p in update.moments.parameters]]
        return kinds if self.settings.limits is None else [*kinds, [layer.fresh for layer in update.layers]]

    def read(self, arrays: Sequence[Array]) -> None:
        """Load the arrays that `write` wrote: the arrays of `memory` in order, in any shape.

        For LAMB an array [parameters, 4] follows, with the numbers of each parameter in the order of
        `LayerState.scalars`.
        """
        for mine, array in zip(chain.from_iterable(self.memory), arrays, strict=False):
            mine[...] = array.reshape(-1)
        if self.settings.limits is not None:
            for layer, row in zip(self._update.layers, arrays[-1], strict=True):
                layer.load(dict(zip(layer.scalars(), row, strict=True)))

    def write(self, arrays: Sequence[Array]) -> None:
        """Write the state, except residuals, to arrays in the layout of `read`."""
        for mine, array in zip(chain.from_iterable(self.memory), arrays, strict=False):
            array[...] = mine.reshape(array.shape)
        if self.settings.limits is not None:
            for layer, row in zip(self._update.layers, arrays[-1], strict=True):
                row[...] = list(layer.scalars().values())

    def seek(self, steps: int) -> None:
        """Continue as after `steps` steps.

        If this differs from the number of steps taken, residuals are dropped, because they belong to another run.
        """
        moments = self._update.moments
        if moments.steps != steps:
            moments.load(steps, {})

    def step(
        self, values: Sequence[Array], hypers: Sequence[Hyperparameters], used: Sequence[bool], *, skip: bool = False
    ) -> bool:
        """Update `values`, the parameters, with the mean of all ranks' gradients. Collective.

        `used` marks the `gradients` that were written; the others count as zeros. With `skip`, nothing changes on any
        rank if a gradient is not finite on some rank; then this returns False. Warns once about gradients that arrived
        too late.
        """
        update = self._update
        moments = update.moments
        for number, (parameter, is_used) in enumerate(zip(moments.parameters, used, strict=True)):
            moments.used[number] = is_used
            if not is_used:
                parameter.gradient[...] = 0
        result = update.step(values, hypers, skip=skip)
        if moments.has_late_gradients and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.settings.kind}: weights without a gradient in the first {self.settings.freeze_step} steps have "
                "one now. They are no longer trained, because their second moment is zero: choose a larger freeze_step",
                stacklevel=5,  # the user's line, above a helper of the adapter's step() and a wrapper of its framework
            )
        return result

    def state(self) -> dict[str, Any]:
        """Return the state without arrays: steps, LAMB's numbers, and this rank's residuals by parameter."""
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
            raise UsageError(f"this is not a state of {kind}")
        if state["freeze_step"] != freeze_step:
            raise UsageError(
                f"the state has freeze_step={state['freeze_step']}, but this optimizer has {freeze_step}: they must be "
                "equal"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that `state` returned; {} is the initial state.

        Only the rank that saved residuals loads them. The moments must be in `memory` before the next step.
        """
        self._loaded = dict(state)
        if self._started is not None:
            self._adopt()

    def _adopt(self) -> None:
        update, loaded = self._update, self._loaded
        is_mine = loaded.get("rank") == update.moments.comm.rank
        update.moments.load(loaded.get("steps", 0), loaded["residuals"] if is_mine else {})
        start = [LayerState(0).scalars()] * len(update.layers)
        for layer, scalars in zip(update.layers, loaded.get("layers", start), strict=True):
            layer.load(scalars)
