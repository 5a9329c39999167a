"""Retained values: values that a model keeps after its call, as an attribute, in a list or in a closure. [pure]"""

from __future__ import annotations

from commlib.tensor_parallel.placements import CALLER, SHARED, Placement
from commlib.tensor_parallel.rules.plan_error import PlanError
from commlib.tensor_parallel.rules.value_tracker import Doubt, ValueTracker
from commlib.tensor_parallel.styles import PerRank, Slice, Vocabulary

_WITHOUT_GRADIENT = (
    "it is kept after the model's call, without a gradient, and is {}, so each rank keeps a different value. If the "
    "full value is meant, gather or sum it first (tp.reduce of a sum, tp.gather, or gather=True)"
)
_REMEDY = (
    "gather or sum it first (tp.reduce of a sum, tp.gather, or gather=True); keep it in an object with cache in its "
    "name, if only the model uses it; or pass divided_output=True"
)


def check_retained(following: ValueTracker, value: int) -> None:
    """Check a value that is kept after the model's call like a returned one.

    A shard with a gradient would train each rank differently: it is refused. A shard without one is a doubt, because
    each rank may want its own, for inspection. Raises PlanError.
    """
    state, step = following.of(value), following.trace.maker(value)
    is_detached = value in following.trace.detached
    if state == SHARED and not is_detached:
        actual = "it has Replicate(into_sharded=True), and is kept after the model's call with its gradient"
        raise PlanError(step, "count", actual, "remove into_sharded, or keep it without its gradient", state)
    is_of_part = is_detached and value in following.unknown  # otherwise numbers are compared
    if not (_is_part(following, state) or is_of_part):
        return
    if not is_detached:
        raise PlanError(step, "retained", f"it is kept, and is {state}", _REMEDY, state)
    how = "made of sharded values" if is_of_part else f"{state}"
    following.doubts.append(Doubt(step, state, _WITHOUT_GRADIENT.format(how), stays=True))


def _is_part(following: ValueTracker, state: Placement) -> bool:
    """Return whether a value unexpectedly differs between ranks.

    Sharded logits are expected by their loss; values computed from a per-rank number are no shards.
    """
    if state.name == "sequence" or state.by == CALLER:
        return state.by != CALLER and not following.sequences_sharded
    expected = isinstance(following.styles.get(state.by), Vocabulary | PerRank | Slice)
    return state.name == "partial" or (state.is_divided and not expected)
