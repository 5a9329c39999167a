"""Auto plans: find the plan of a transformer-like model, by tracing the order of its layers. [pure]

A pair is a layer, or several with one input, whose features reach one other layer and nothing else: Q, K and V reach
the output of attention, up and gate reach down. The first are Columns, the last is a Row. The rules check each pair; a
pair that they cannot verify is not sharded. Only user-written gradients are checked later, by numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from commlib.tensor_parallel.heads import units_of_queries
from commlib.tensor_parallel.low_rank_adapters import LowRank, find_low_ranks
from commlib.tensor_parallel.numbers import NotShardable
from commlib.tensor_parallel.pairs import States, shard_pair, trace_back
from commlib.tensor_parallel.placements import Placement
from commlib.tensor_parallel.rules import PlanError, check
from commlib.tensor_parallel.styles import Column, PerRank, Slice, Style, Vocabulary, brief
from commlib.tensor_parallel.trace import ModelTrace, TraceStep, reach

_LOGITS = Vocabulary(gather=True)

Able = Callable[[str, Style], bool]
"""Returns whether an adapter can shard a layer, given its name and style."""


@dataclass(slots=True)
class AutoPlan:
    """A plan, and the reason for each candidate layer to be sharded or not."""

    plan: dict[str, Style] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def find_auto_plan(trace: ModelTrace, size: int, able: Able) -> AutoPlan:
    """Return the plan for an axis of `size` ranks, from the trace of an unsharded model."""
    result = AutoPlan()
    _vocabularies(trace, size, able, result)
    for step in trace.steps:
        if step.kind == "attention" and step.layer not in result.reasons:
            _attention(step, size, able, result)
    undivided, added = check(trace, {}).states, find_low_ranks(trace)
    for last, firsts in _pairs(trace, result, added).items():
        _pair(trace, undivided, size, able, result, firsts, last, added)
    for one in added:
        for name in (one.first, one.second):
            result.reasons.setdefault(name, f"of rank {one.rank}, added to {one.base}")
    for step in trace.steps:
        if step.kind == "product":
            result.reasons.setdefault(step.layer, "its output does not reach exactly one other layer")
    while True:
        try:
            doubts = [one for one in check(trace, result.plan, size=size).doubts if not one.is_of_gradient]
        except PlanError as error:
            _give_up(trace, result, error)
            continue
        if not doubts:
            return result
        leave_whole(trace, result, doubts[0].step, doubts[0].state, f"{doubts[0]}")


def leave_whole(trace: ModelTrace, result: AutoPlan, step: TraceStep, state: Placement, why: str) -> None:
    """Remove from a plan the pair that caused a step's invalid placement; if none is known, the last pair before it.

    state: placement of the step's input or output. why: the reason, for the table.
    """
    names = {step.layer, state.by, state.source} & set(result.plan) or _layers_before(trace, result, step)
    if not names:
        place = next((at for at, one in enumerate(trace.steps) if one is step), len(trace.steps))
        before = [one.layer for one in trace.steps[:place] if one.layer in result.plan]
        names = {(before or list(result.plan))[-1]}
    pairs = {result.reasons[name] for name in names}
    for name in [name for name in result.plan if name in names or result.reasons[name] in pairs]:
        del result.plan[name]
        result.reasons[name] = why


def _give_up(trace: ModelTrace, result: AutoPlan, error: PlanError) -> None:
    """Remove the layer that breaks a rule from the plan, together with the layers of its pair, and no others."""
    tied = {name for names in trace.tied if error.step.layer in names for name in names}
    names = {error.step.layer, error.state.by, *tied}.intersection(result.plan) or _layers_before(
        trace, result, error.step
    )
    reasons = {result.reasons[name] for name in names}
    for name in [name for name in result.plan if not names or result.reasons[name] in reasons]:
        del result.plan[name]
        result.reasons[name] = f"{error}"


def _layers_before(trace: ModelTrace, result: AutoPlan, step: TraceStep) -> set[str]:
    """Return the planned layers that produce a step's inputs, without another planned layer between."""
    names, waiting, seen = set[str](), list(step.inputs), set[int]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        maker = trace.maker(value)
        if maker.layer in result.plan:
            names.add(maker.layer)
        else:
            waiting += maker.inputs
    return names


def _vocabularies(trace: ModelTrace, size: int, able: Able, result: AutoPlan) -> None:
    """Find word embeddings, whose indices are model inputs, and the layers that compute logits of as many words."""
    users, arguments = trace.users, {v for step in trace.steps if step.kind == "given" for v in step.outputs}
    logits = [step for step in trace.steps if step.kind == "product" and _is_last(trace, users, step)]
    tables = {step.layer for step in trace.steps if step.kind == "table"}
    called = {step.layer for step in trace.steps}
    for step in trace.steps:
        if step.kind != "table" or step.layer in result.reasons:
            continue
        words, features = step.size
        tied = {name for names in trace.tied if step.layer in names for name in names}
        from_outside = any(source.kind == "given" for source in trace_back(trace, step.inputs[0]) or ())
        heads = {head.layer for head in logits if head.layer in tied or (from_outside and head.size[1] == words)}
        if not heads and (words < features or not arguments.intersection(step.inputs)):
            result.reasons[step.layer] = f"{words} rows are few, or not words"
        elif words < size:
            result.reasons[step.layer] = f"{words} rows for {size} ranks"
        elif tied.intersection(called) - heads - tables:
            result.reasons[step.layer] = f"its weight is shared with {', '.join(sorted(tied - {step.layer}))}"
        else:
            _vocabulary(step.layer, tied & tables | {step.layer}, heads, tied - called, able, result)


def _vocabulary(table: str, tables: set[str], heads: set[str], idle: set[str], able: Able, result: AutoPlan) -> None:
    """Shard tables that share a weight, and their logits layers. idle: layers with that weight that were not called."""
    styles: dict[str, Style] = {**dict.fromkeys(sorted(tables), Vocabulary()), **dict.fromkeys(sorted(heads), _LOGITS)}
    for name in sorted(idle):
        styles[name] = _LOGITS if able(name, _LOGITS) else Vocabulary()
    unable = [name for name, style in styles.items() if not able(name, style)]
    for name, style in styles.items():
        if unable:
            result.reasons[name] = f"{unable[0]} cannot be sharded by words"
        else:
            result.plan[name] = style
            result.reasons[name] = f"logits of the words of {table}" if name in heads else "words"


def _is_last(trace: ModelTrace, users: Mapping[int, Sequence[int]], step: TraceStep) -> bool:
    ends, values = reach(trace, users, step)
    return not ends and bool(values.intersection(trace.outputs))


def _attention(step: TraceStep, size: int, able: Able, result: AutoPlan) -> None:
    style = Column()
    if not units_of_queries(*step.size, size):
        result.reasons[step.layer] = f"{step.size[1]} heads for {size} ranks"
    elif able(step.layer, style):
        result.plan[step.layer], result.reasons[step.layer] = style, f"a complete attention of {step.size[1]} heads"
    else:
        result.reasons[step.layer] = f"a {step.text} with these options cannot be sharded"


def _pairs(trace: ModelTrace, result: AutoPlan, added: Sequence[LowRank]) -> dict[str, list[str]]:
    """Return for each layer that could be a Row the layers that could be its Columns."""
    users, pairs, used = trace.users, dict[str, list[str]](), set[str]()
    bases = {one.first: one.base for one in added}
    for step in trace.steps:
        if step.kind != "product" or step.layer in result.reasons or step.layer in used or step.layer in bases:
            continue
        ends, values = reach(trace, users, step)
        names = {bases.get(end.layer, end.layer) for end in ends}
        if len(names) != 1 or values.intersection(trace.outputs) or ends[0].kind != "product":
            continue
        (last,) = names
        if last == step.layer or last in result.reasons or any(last in firsts for firsts in pairs.values()):
            continue
        if step.layer not in pairs.setdefault(last, []):
            pairs[last].append(step.layer)
        used |= {last, step.layer, *(one.second for one in added if one.base == last)}
    return pairs


def _pair(
    trace: ModelTrace,
    undivided: States,
    size: int,
    able: Able,
    result: AutoPlan,
    firsts: list[str],
    last: str,
    added: Sequence[LowRank],
) -> None:
    """Try to shard some layers and the layer that they reach, together with the low-rank factors added to them."""
    bases = {one.second: one.base for one in added if {one.second, one.base} <= set(firsts)}
    lasts = [last, *(one.first for one in added if one.base == last)]
    try:
        numbers = {name: style for name, style in result.plan.items() if isinstance(style, PerRank)}
        styles = shard_pair(trace, undivided, size, firsts, lasts, numbers, bases)
        for name, style in styles.items():
            if not isinstance(style, PerRank | Slice) and not able(name, style):
                raise NotShardable(f"{name} cannot be sharded as {brief(style)}")
    except (PlanError, NotShardable) as error:
        result.reasons.update(dict.fromkeys((*firsts, *lasts), f"{error}"))
        return
    result.plan.update(styles)
    result.reasons.update(dict.fromkeys(styles, f"{', '.join(firsts)} -> {last}"))
