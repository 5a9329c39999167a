"""The moments of 1-bit optimizers, and how they travel: in full until they are frozen, then as signs.

Each rank's own gradients or moments are put where the node sees them, and come back averaged. See `one_bit_adam`.
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
from commlib.compress.scheme import Part, Scheme, State
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.devices.arrays import device_of
from commlib.devices.host import HOST
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host import moments as kernels


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hold what a step depends on, for one parameter. decoupled: the weights decay as in AdamW, not as in Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    decoupled: bool = False


def check_hyper(kind: str, hyper: Hyper) -> None:
    """Check the numbers of a step. `kind` is the optimizer's name in errors. Raises UsageError."""
    lr, beta1, beta2, eps, weight_decay = hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay
    if not (lr >= 0 and eps > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and weight_decay >= 0):
        raise UsageError(
            f"{kind}: expected lr >= 0, eps > 0, weight_decay >= 0 and betas from 0 to below 1, got lr={lr}, "
            f"eps={eps}, weight_decay={weight_decay}, betas={(beta1, beta2)}"
        )


def check_phases(kind: str, freeze_step: int, floor: float) -> None:
    """Check the length of the first phase, and the floor of second moments after it. Raises UsageError."""
    if freeze_step < 1:
        raise UsageError(
            f"{kind}: freeze_step must be at least 1, got {freeze_step}: without a step in full precision there is no "
            "second moment to divide by; 15 to 25 % of all steps are usual"
        )
    if not 0 <= floor < 1:
        raise UsageError(
            f"{kind}: variance_floor, the floor of second moments, must be at least 0 and less than 1, got {floor}"
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter's moments, and where its gradient is put. All are views, float32 and 1-D."""

    name: str
    gradient: Array
    first: Array
    second: Array


class Moments:
    """The moments of all parameters on this rank, and how they are averaged. Collective to make.

    `parameters` are names and numbers of elements. Before a step the caller writes this rank's gradients to
    `parameters[i].gradient`, and 1 to `used[i]`, or 0 if there is no gradient.

    A root of a frozen second moment is at least `floor` times the root of their mean in the parameter. 0.03 is what one
    gradient of usual size leaves (with beta2 = 0.999) of an element that seldom has any; 0 is the paper.

    An element whose second moment is zero when that is frozen saw no gradient until then: it is left out of what is
    sent, because a sign has no zero, and is not trained any more. `came_late` says whether it should have been.
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
        self.came_late = False
        self._compression = GradientCompression(comm, scheme, within_node=within_node)
        counts = [count for _, count in parameters]
        total = sum(counts)
        self._sent = comm.empty(total + len(counts))  # symmetric: where nothing is compressed nothing is copied
        self._first, self._second = np.zeros(total, np.float32), np.zeros(total, np.float32)
        self.used: Array = self._sent[total:]
        stops = np.cumsum(counts, dtype=np.int64).tolist()
        self.parameters = [
            Parameter(name, *(array[stop - count : stop] for array in (self._sent, self._first, self._second)))
            for (name, count), stop in zip(parameters, stops, strict=True)
        ]
        self._exchange: Callable[[], bool] | None = None  # made by the first frozen step
        self._loaded: State = {}  # for that

    @property
    def frozen(self) -> bool:
        """Whether the next step is one with signs."""
        return self.steps >= self.freeze_step

    def check(self, values: Sequence[Any]) -> None:
        """Raise UsageError if parameters are not on the host, where the moments are; nothing has been sent then."""
        for parameter, value in zip(self.parameters, values, strict=True):
            if (device := device_of(value)) is not HOST:
                raise UsageError(
                    f"1-bit optimizers update parameters on the host only, but {parameter.name} is on {device.name}: "
                    "keep it on the host, or compress gradients of another optimizer"
                )

    def average(self, *, check: bool) -> bool:
        """Average what stands in the gradients over the ranks; they are moments by now if `frozen`. Collective.

        Returns whether the result is finite, if `check`, or it costs nothing to know.
        """
        if not self.frozen:
            self.comm.all_reduce(self._sent, "mean", out=self._sent)
            return not check or is_finite(self._sent)
        if self._exchange is None:
            self._exchange = self._make_exchange()
        return self._exchange()

    def count_step(self) -> None:
        """Note that a step was taken, when the moments are what they are after it."""
        self.steps += 1
        if self.steps == self.freeze_step:
            for parameter in self.parameters:
                kernels.raise_to(parameter.second, self._floor**2)

    def state(self) -> State:
        """Return what the compression remembers on this rank, as `GradientCompression.state` does."""
        return self._loaded if self._exchange is None else self._compression.state()

    def load(self, steps: int, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Take over a state; the moments must have been written to `parameters` before."""
        self.steps = steps
        self._exchange = None  # what is sent depends on the second moments
        self._loaded = {name: dict(known) for name, known in state.items()}
        self._compression.load(state)

    def _make_exchange(self) -> Callable[[], bool]:
        sent, compression = self._sent, self._compression
        silent = np.flatnonzero(self._second == 0)
        if compression.scheme is None:

            def plainly() -> bool:
                self._silence(silent)
                self.comm.all_reduce(sent, "mean", out=sent)
                return is_finite(sent)

            return plainly
        heard = np.flatnonzero(self._second) if len(silent) else None
        array = sent if heard is None else self.comm.empty(len(heard) + len(self.used))
        parts, start = [], 0
        for parameter in self.parameters:
            here = int(np.count_nonzero(parameter.second))
            parts.append(Part(parameter.name, start, (here,)))
            start += here
        reduction = compression.reduction("one_bit", array, parts, start, "mean")

        def by_signs() -> bool:
            if heard is not None:
                self._silence(silent)
                np.take(sent, heard, out=array[:start])
                array[start:] = self.used
            reduction()
            if heard is not None:
                sent[heard] = array[:start]
                self.used[...] = array[start:]
            compression.end_step()
            return reduction.finite

        return by_signs

    def _silence(self, silent: Array) -> None:
        if len(silent):
            self.came_late = self.came_late or bool(self._sent[silent].any())
            self._sent[silent] = 0
