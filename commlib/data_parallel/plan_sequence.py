"""Plans that consist of other plans: run one after another, as several operations of a group or as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commlib.data_parallel.bucket_reducer import BucketPlan, PendingReduction


class PlanSequence:
    """A plan that runs plans of one group, which keeps them in order. It sends `nbytes`."""

    def __init__(self, plans: Sequence[BucketPlan], nbytes: int) -> None:
        self._plans = plans
        self.sent_bytes = self.uncompressed_bytes = nbytes

    def __call__(self) -> Any:
        """Run all plans in this thread."""
        for plan in self._plans:
            plan()

    def start(self) -> PendingReduction:
        """Start all plans on the progress thread."""
        return _StartedPlans([plan.start() for plan in self._plans])


class PlanProgram(PlanSequence):
    """A plan that runs plans of several groups as one operation of `whole`, which has all their ranks.

    Groups do not wait for each other, so a plan may use the result of the one before it only within one operation.
    No other operation may use these groups. text: a description, the same on all ranks; on: an array that it works on.
    """

    def __init__(self, whole: Any, text: str, plans: Sequence[BucketPlan], nbytes: int, *, on: Any) -> None:
        super().__init__(plans, nbytes)
        self._program = whole.plan_program(text, super().__call__, on=on)
        self.start: Callable[..., PendingReduction] = self._program.start

    def __call__(self) -> Any:
        """Run the operation in this thread."""
        return self._program()


class _StartedPlans:
    """Operations that were started one after another."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    @property
    def seconds(self) -> float:
        """Total run time."""
        return float(sum(work.seconds for work in self._works))

    def done(self) -> bool:
        """Return whether all have ended."""
        return all(work.done() for work in self._works)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for all of them; then raise the first failure."""
        failure: Exception | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
