"""Cut check: compare the results of a cut model with the original model's, and name the first difference.

For an adapter's `pipeline(verify=batch)`: it runs a copy of the original model once, forward and backward, and records
a `ModelRun`; it runs copies of the stages on the same batch, with the same random numbers, and records another one with
the same names; then all ranks call `compare_with_original`. The adapter does so for the stages one after another in one
process, which checks the cut, and for a step of the pipeline, in which each rank has only its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from commlib.comparison.parameter_check import GatherRanks
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.tensor_parallel.checks.compare import difference


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One forward and backward of a model: its values by name, in the order of computation.

    values: such as {"the output of encoder.0": array}; a value that is not numeric is recorded as text, such as {"the
    output": "a tuple of 2 values"}. gradients: by the names of weights, None for a missing one. state: by the names of
    buffers or variables, after the run. stages: the stage of each value, weight and state of a cut model, by the same
    names.

            Run({"the loss": np.array(0.5)}, gradients={"dense.kernel": array}, state={}, stages={"dense.kernel": 1})
    """

    values: Mapping[str, Array | str] = field(default_factory=dict)
    gradients: Mapping[str, Array | None] = field(default_factory=dict)
    state: Mapping[str, Array] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)


def compare_with_original(
    comm: GatherRanks,
    whole: ModelRun,
    own: ModelRun,
    *,
    when: str = "",
    tolerance: float | None = None,
    every: bool = True,
    hint: str = "",
) -> None:
    """Raise UsageError on all ranks if a cut model's results differ from the original's on any rank. Collective.

    whole: of the original model, the same on all ranks. own: of the stages, as far as this rank has them. Compares
    values, gradients and state, in this order; the error names the first difference, its stage, its size and the ranks.
    when: the mode of the runs, such as "in training". tolerance: relative to the largest element; by default
    `commlib.tensor_parallel.checks.compare.TOLERANCES` for the dtype. every: also raise if no rank has some value of
    the original model. hint: a possible reason, the same on all ranks.
    """
    difference: tuple[int, str] | None = None
    for at, (what, problem) in enumerate(_differences(whole, own, tolerance)):
        if problem:
            difference = at, f"{what} {problem}"
            break
    gathered = comm.all_gather_object((difference, sorted(_names(own))))
    first = min((one[0] for one, _ in gathered if one is not None), default=None)
    how = f", {when}" if when else ""
    if first is not None:
        ranks = [rank for rank, (one, _) in enumerate(gathered) if one is not None and one[0] == first]
        problem = next(one[1] for one, _ in gathered if one is not None and one[0] == first)
        on = "" if len(ranks) == comm.size else f" (on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        raise UsageError(f"pipeline: the cut model differs from the original{how}: {problem}{on}{hint}")
    known = {name for _, names in gathered for name in names}
    if every and (missing := [name for name in _names(whole) if name not in known]):
        raise UsageError(f"pipeline: the cut model differs from the original{how}: no stage has {missing[0]}")


def mode(training: bool) -> str:
    """Return the description of a run in training or in evaluation mode, for errors."""
    return "in training" if training else "in evaluation"


def cut_failure(training: bool, error: Exception) -> str:
    """Return the error for a cut model that fails where the original model runs."""
    return (
        f"pipeline: the split model fails {mode(training)}, and the whole model does not: "
        f"{type(error).__name__}: {error}"
    )


def _names(run: ModelRun) -> list[str]:
    return [
        *run.values,
        *(f"the gradient of {name}" for name in run.gradients),
        *(f"{name} after it" for name in run.state),
    ]


def _differences(whole: ModelRun, own: ModelRun, tolerance: float | None) -> Iterator[tuple[str, str]]:
    """Yield the description of each value of the original model, and its difference here: "" if there is none."""
    for name, expected in whole.values.items():
        actual = own.values.get(name)
        yield f"{name}{_stage(own, name)}", "" if actual is None else _describe_difference(actual, expected, tolerance)
    sizes = (float(np.abs(each).max(initial=0.0)) for each in whole.gradients.values() if each is not None)
    floor = max(sizes, default=0.0) / 100  # some gradients are zero except for rounding errors
    for name, gradient in whole.gradients.items():
        problem = ""
        if name in own.gradients:
            actual = own.gradients[name]
            if (actual is None) != (gradient is None):
                problem = "is missing" if actual is None else "exists, but the original model has none"
            elif actual is not None and gradient is not None:
                problem = _describe_difference(actual, gradient, tolerance, floor)
        yield f"the gradient of {name}{_stage(own, name)}", problem
    for name, array in whole.state.items():
        actual = own.state.get(name)
        yield (
            f"{name}{_stage(own, name)} after it",
            "" if actual is None else _describe_difference(actual, array, tolerance),
        )
    known = set(_names(whole))
    for name in _names(own):
        if name not in known:
            yield name, "does not exist in the original model"


def _stage(run: ModelRun, name: str) -> str:
    return f" (stage {run.stages[name]})" if name in run.stages else ""


def _describe_difference(
    actual: Array | str, expected: Array | str, tolerance: float | None, floor: float = 0.0
) -> str:
    if isinstance(actual, str) or isinstance(expected, str):
        return (
            "" if isinstance(actual, str) and actual == expected else f"is {_text(actual)}, expected {_text(expected)}"
        )
    if actual.dtype != expected.dtype:
        return f"is of dtype {actual.dtype}, expected {expected.dtype}"
    largest = float(np.abs(expected).max(initial=0.0)) if floor else None
    problem = difference(actual, expected, tolerance, largest=None if largest is None else max(largest, floor))
    return f"differs: {problem}" if problem else ""


def _text(value: Array | str) -> str:
    return value if isinstance(value, str) else f"an array of shape {list(value.shape)} and dtype {value.dtype}"
