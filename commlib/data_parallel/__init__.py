"""Data parallelism without a framework: the GradientReducer that every adapter drives, and its components.

Users see two of its classes: `StepReport` and `Statistics` are the `report` and the `statistics` of an optimizer.
"""

from commlib.data_parallel.report import Statistics, StepReport

__all__ = ["Statistics", "StepReport"]
