"""Moments of 1-bit optimizers: average them in full precision until they are frozen, then as signs.

Each rank writes its gradients or moments to symmetric memory, where they are averaged in place. See `one_bit_adam`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.compress.codecs.sign import Sign
from commlib.compress.feedback import is_finite
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart, Scheme, State
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.devices.arrays import device_of
from commlib.devices.host import HOST
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host import moments as kernels


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters of a step for one parameter. decoupled: weights decay as in AdamW instead of Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    decoupled: bool = False


def check_hyper(kind: str, hyper: Hyperparameters) -> None:
    """Check hyperparameters. `kind` is the optimizer's name in errors. Raises UsageError for invalid ones."""
    lr, beta1, beta2, eps, weight_decay = hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay
    if not (lr >= 0 and eps > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and weight_decay >= 0):
        raise UsageError(
            f"{kind}: expected lr >= 0, eps > 0, weight_decay >= 0 and betas from 0 to below 1, got lr={lr}, "
            f"eps={eps}, weight_decay={weight_decay}, betas={(beta1, beta2)}"
        )


def check_phases(kind: str, freeze_step: int, floor: float) -> None:
    """Raise UsageError for an invalid length of the first phase, or an invalid floor of second moments."""
    if freeze_step < 1:
        raise UsageError(
            f"{kind}: freeze_step must be at least 1, got {freeze_step}: the second moment comes from steps in full "
            "precision; 15 to 25 % of all steps are usual"
        )
    if not 0 <= floor < 1:
        raise UsageError(
            f"{kind}: variance_floor, the floor of second moments, must be at least 0 and less than 1, got {floor}"
        )


@dataclass(frozen=True, slots=True)
class ParameterMoments:
    """One parameter's gradient and moments. All are views, float32 and 1-D."""

    name: str
    gradient: Array
    first: Array
    second: Array


class Moments:
    """The moments of all parameters on this rank, and their averaging. Construction is collective.

    `parameters` lists names and numbers of elements. Before a step the caller writes this rank's gradients to
    `parameters[i].gradient`, and 1 to `used[i]`, or 0 if there is no gradient.

    The root of a frozen second moment is at least `floor` times the root of the parameter's mean second moment. 0.03 is
    the value that one average gradient leaves (with beta2 = 0.999) in an element that rarely has one; 0 is the paper's
    choice.

    An element whose second moment is zero at the freeze has had no gradient. It is not sent, because a sign cannot
    express zero, and it is no longer trained. `has_late_gradients` is True if such an element got a gradient later.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[tuple[str, int]],
        freeze_step: int,
        *,
        scheme: Scheme | None = None,
        floor: float = 0.03,
        within_node: bool = False,
        what: str = "OneBitAdam",
    ) -> None:
        check_phases(what, freeze_step, floor)
        scheme = AllToAll(Sign()) if scheme is None else scheme
        settings = f"freeze_step={freeze_step} floor={floor} {scheme.name} within_node={within_node}"
        check_agreement(comm, what, [settings, *(f"{name}: {count} elements" for name, count in parameters)])
        self.comm, self.freeze_step, self.steps = comm, freeze_step, 0
        self._floor = floor
        self.has_late_gradients = False
        self._compression = GradientCompression(comm, scheme, within_node=within_node)
        counts = [count for _, count in parameters]
        total = sum(counts)
        self._buffer = comm.empty(total + len(counts))  # symmetric: without compression there are no copies
        self._first, self._second = np.zeros(total, np.float32), np.zeros(total, np.float32)
        self.used: Array = self._buffer[total:]
        stops = np.cumsum(counts, dtype=np.int64).tolist()
        self.parameters = [
            ParameterMoments(name, *(array[stop - count : stop] for array in (self._buffer, self._first, self._second)))
            for (name, count), stop in zip(parameters, stops, strict=True)
        ]
        self._exchange: Callable[[], bool] | None = None  # set by the first frozen step
        self._loaded: State = {}  # for `_exchange`

    @property
    def frozen(self) -> bool:
        """Whether the next step uses signs."""
        return self.steps >= self.freeze_step

    def check(self, values: Sequence[Any]) -> None:
        """Raise UsageError, before communication, if parameters are not on the host, where the moments are."""
        for parameter, value in zip(self.parameters, values, strict=True):
            if (device := device_of(value)) is not HOST:
                raise UsageError(
                    f"1-bit optimizers update parameters on the host only, but {parameter.name} is on {device.name}: "
                    "keep it on the host, or use gradient compression with another optimizer"
                )

    def average(self, *, check: bool) -> bool:
        """Average the gradients over the ranks; they hold moments if `frozen`. Collective.

        Returns whether the result is finite, if `check` or if the test is free, else True.
        """
        if not self.frozen:
            self.comm.all_reduce(self._buffer, "mean", out=self._buffer)
            return not check or is_finite(self._buffer)
        if self._exchange is None:
            self._exchange = self._make_exchange()
        return self._exchange()

    def count_step(self) -> None:
        """Record that a step was taken, after the moments were updated."""
        self.steps += 1
        if self.steps == self.freeze_step:
            for parameter in self.parameters:
                kernels.raise_to(parameter.second, self._floor**2)

    def state(self) -> State:
        """Return the compression state of this rank, as `GradientCompression.state` does."""
        return self._loaded if self._exchange is None else self._compression.state()

    def load(self, steps: int, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Load a state; the caller has written the moments to `parameters` before."""
        self.steps = steps
        self._exchange = None  # the second moments select the sent elements
        self._loaded = {name: dict(known) for name, known in state.items()}
        self._compression.load(state)

    def _make_exchange(self) -> Callable[[], bool]:
        buffer, compression = self._buffer, self._compression
        silent = np.flatnonzero(self._second == 0)
        if compression.scheme is None:

            def plainly() -> bool:
                self._clear_silent(silent)
                self.comm.all_reduce(buffer, "mean", out=buffer)
                return is_finite(buffer)

            return plainly
        nonzero = np.flatnonzero(self._second) if len(silent) else None
        array = buffer if nonzero is None else self.comm.empty(len(nonzero) + len(self.used))
        parts, start = [], 0
        for parameter in self.parameters:
            here = int(np.count_nonzero(parameter.second))
            parts.append(BucketPart(parameter.name, start, (here,)))
            start += here
        reduction = compression.reduction("one_bit", array, parts, start, "mean")

        def by_signs() -> bool:
            if nonzero is not None:
                self._clear_silent(silent)
                np.take(buffer, nonzero, out=array[:start])
                array[start:] = self.used
            reduction()
            if nonzero is not None:
                buffer[nonzero] = array[:start]
                self.used[...] = array[start:]
            compression.end_step()
            return reduction.finite

        return by_signs

    def _clear_silent(self, silent: Array) -> None:
        if len(silent):
            self.has_late_gradients = self.has_late_gradients or bool(self._buffer[silent].any())
            self._buffer[silent] = 0
