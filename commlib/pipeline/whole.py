"""Whole: hold what a cut model computes against what the whole one does, and name the first that differs.

How an adapter gives `pipeline(verify=batch)`: it runs a copy of the whole model once, forward and backward, and writes
down a `Run`; it runs copies of the stages on the same batch, with the same random numbers, and writes down another one
under the same names; then all ranks call `compare_with_whole`. It does so for the stages one after another in one
process, which shows what cutting has changed, and for a step of the pipeline, in which each rank knows its own values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from commlib.comparison.parameter_check import Gathers
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.tensor_parallel.checks.differences import difference


@dataclass(frozen=True, slots=True)
class Run:
    """One forward and backward of a model, by what each value is, in the order in which they are computed.

    values: such as {"the output of encoder.0": array}; what is no number is told as text, as {"the output": "a tuple of
    2 values"}. gradients: by the names of weights, None where there is none. state: by the names of buffers or
    variables, as it is afterwards. stages: to which stage of a cut model values, weights and state belong, by the same
    names.

        Run({"the loss": np.array(0.5)}, gradients={"dense.kernel": array}, state={}, stages={"dense.kernel": 1})
    """

    values: Mapping[str, Array | str] = field(default_factory=dict)
    gradients: Mapping[str, Array | None] = field(default_factory=dict)
    state: Mapping[str, Array] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)


def compare_with_whole(
    comm: Gathers,
    whole: Run,
    own: Run,
    *,
    when: str = "",
    tolerance: float | None = None,
    every: bool = True,
    hint: str = "",
) -> None:
    """Raise UsageError on all ranks if a cut model computed something else than the whole one on any. Collective.

    whole: of a whole model, the same on all ranks. own: of the stages, as far as this rank knows them. What is
    compared, in this order, are values, gradients and state; the first that differs is named, with its stage, by how
    much, and on which ranks. when: how they ran, such as "in training". tolerance: relative to the largest element; by
    default that of `commlib.tensor_parallel.checks.differences.TOLERANCES` for the dtype. every: raise, too, if some
    value of the whole model is known to no rank. hint: what may be the reason, in words, the same on all ranks.
    """
    found: tuple[int, str] | None = None
    for at, (what, said) in enumerate(_differences(whole, own, tolerance)):
        if said:
            found = at, f"{what} {said}"
            break
    told = comm.all_gather_object((found, sorted(_names(own))))
    first = min((one[0] for one, _ in told if one is not None), default=None)
    how = f", {when}" if when else ""
    if first is not None:
        ranks = [rank for rank, (one, _) in enumerate(told) if one is not None and one[0] == first]
        said = next(one[1] for one, _ in told if one is not None and one[0] == first)
        on = "" if len(ranks) == comm.size else f" (on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        raise UsageError(f"pipeline: the cut model is not the whole one{how}: {said}{on}{hint}")
    known = {name for _, names in told for name in names}
    if every and (missing := [name for name in _names(whole) if name not in known]):
        raise UsageError(f"pipeline: the cut model is not the whole one{how}: no stage has {missing[0]}")


def _names(run: Run) -> list[str]:
    return [
        *run.values,
        *(f"the gradient of {name}" for name in run.gradients),
        *(f"{name} after it" for name in run.state),
    ]


def _differences(whole: Run, own: Run, tolerance: float | None) -> Iterator[tuple[str, str]]:
    """Yield what each value of the whole model is, and how it differs here, in words: "" if it does not."""
    for name, expected in whole.values.items():
        came = own.values.get(name)
        yield f"{name}{_stage(own, name)}", "" if came is None else _apart(came, expected, tolerance)
    sizes = (float(np.abs(each).max(initial=0.0)) for each in whole.gradients.values() if each is not None)
    floor = max(sizes, default=0.0) / 100  # some gradients are zero but for rounding
    for name, gradient in whole.gradients.items():
        said = ""
        if name in own.gradients:
            came = own.gradients[name]
            if (came is None) != (gradient is None):
                said = "is missing" if came is None else "is there, and the whole model has none"
            elif came is not None and gradient is not None:
                said = _apart(came, gradient, tolerance, floor)
        yield f"the gradient of {name}{_stage(own, name)}", said
    for name, array in whole.state.items():
        came = own.state.get(name)
        yield f"{name}{_stage(own, name)} after it", "" if came is None else _apart(came, array, tolerance)
    known = set(_names(whole))
    for name in _names(own):
        if name not in known:
            yield name, "is nothing that the whole model has"


def _stage(run: Run, name: str) -> str:
    return f" (stage {run.stages[name]})" if name in run.stages else ""


def _apart(came: Array | str, expected: Array | str, tolerance: float | None, floor: float = 0.0) -> str:
    if isinstance(came, str) or isinstance(expected, str):
        return "" if isinstance(came, str) and came == expected else f"is {_text(came)}, expected {_text(expected)}"
    if came.dtype != expected.dtype:
        return f"is of dtype {came.dtype}, expected {expected.dtype}"
    largest = float(np.abs(expected).max(initial=0.0)) if floor else None
    said = difference(came, expected, tolerance, largest=None if largest is None else max(largest, floor))
    return f"differs: {said}" if said else ""


def _text(value: Array | str) -> str:
    return value if isinstance(value, str) else f"an array of shape {list(value.shape)} and dtype {value.dtype}"
