"""Keeping: what a model leaves behind by another door than its return, as an attribute, a list or a closure. [pure]"""

from __future__ import annotations

from commlib.tensor_parallel.rules.broken import PlanError
from commlib.tensor_parallel.rules.following import Doubt, Following
from commlib.tensor_parallel.states import CALLER, SHARED, State
from commlib.tensor_parallel.styles import PerRank, Slice, Vocabulary

_ALONE = (
    "it is kept after the model's call, without a gradient, and is {}, so each rank keeps something else: where the "
    "whole is meant, put it together first (tp.reduce of a sum, tp.gather, or gather=True)"
)
_REMEDY = (
    "put it together first (tp.reduce of a sum, tp.gather, or gather=True); keep it in what has cache in its name, if "
    "the model alone goes on with it; or say divided_output=True"
)


def kept(following: Following, value: int) -> None:
    """Hold what is kept after the model's call to what a returned value is held to.

    A part with a gradient would train each rank by its own: it is refused. One without is doubted: each rank may want
    its own to look at, and nothing tells. Raises PlanError.
    """
    state, step = following.of(value), following.trace.maker(value)
    is_detached = value in following.trace.detached
    if state == SHARED and not is_detached:
        came = "this has Replicate(into_sharded=True), and is kept after the model's call with its gradient"
        raise PlanError(step, "count", came, "leave into_sharded out, or keep it without its gradient", state)
    is_of_part = is_detached and value in following.unknown  # else numbers tell
    if not (_is_part(following, state) or is_of_part):
        return
    if not is_detached:
        raise PlanError(step, "kept", f"this is kept, and is {state}", _REMEDY, state)
    how = "made of what is divided" if is_of_part else f"{state}"
    following.doubts.append(Doubt(step, state, _ALONE.format(how), stays=True))


def _is_part(following: Following, state: State) -> bool:
    """Return whether a value is another one on each rank, where nobody expects that.

    Divided logits are for a loss that knows of it; what is made by a number of the rank's own is no part of a whole.
    """
    if state.name == "sequence" or state.by == CALLER:
        return state.by != CALLER and not following.sequences_came
    expected = isinstance(following.styles.get(state.by), Vocabulary | PerRank | Slice)
    return state.name == "partial" or (state.is_divided and not expected)
