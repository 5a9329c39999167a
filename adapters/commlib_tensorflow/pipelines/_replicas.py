"""Replicas: let an optimizer that is distributed reduce the gradients of a pipeline's stages over their replicas.

It reduces when it is applied. Gradients that were reduced before are noted, and not reduced again then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib_tensorflow._in_parts import InParts
from commlib_tensorflow._keras_reduction import Distributed, Reduction

Gradients = Sequence[tf.Tensor | None]
ByStages = Callable[[Mapping[int, Sequence[Any]]], "StageReduction | None"]
"""Of the variables whose gradients each stage completes: begin to reduce those of a step."""


class StageReduction:
    """One step's reduction of this rank's gradients, stage by stage.

    variables: those of the optimizer, in its order. complete: those whose gradients are complete with each stage.
    """

    def __init__(
        self, reduction: Reduction, parts: InParts, variables: Sequence[Any], complete: Mapping[int, Sequence[Any]]
    ) -> None:
        self._reduction, self._parts, self._variables, self._complete = reduction, parts, variables, complete
        self._left = {id(variable): number for number, variable in enumerate(variables)}

    def give(self, stage: int, gradients: Mapping[int, tf.Tensor]) -> None:
        """Reduce what is complete with this stage. gradients: by the id of the variable."""
        self._give({id(variable) for variable in self._complete[stage]}, gradients)

    def finish(self, gradients: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Reduce the rest, and return all gradients, reduced. Collective over the replicas."""
        self._give(set(gradients), gradients)
        found = {id(self._variables[number]): gradient for number, gradient in self._parts.finish().items()}
        if found:
            self._reduction.note(list(found.values()))
        return found

    def _give(self, keys: set[int], gradients: Mapping[int, tf.Tensor]) -> None:
        for key in [key for key in self._left if key in keys and key in gradients]:
            self._parts.put(self._left.pop(key), gradients[key])


def by_stages(optimizer: Any, variables: Sequence[Any], complete: Mapping[int, Sequence[Any]]) -> StageReduction | None:
    """Begin to reduce the gradients of a step by stages, in the order in which these complete them; None if at once.

    variables: all of this rank, in their order. complete: those that are complete with each stage, in the order of
    the stages' last gradients. Collective over the replicas.
    """
    reduction = _reduction_of(optimizer)
    if reduction is None or optimizer.gradient_accumulation_steps or not variables:
        return None
    known = _known(optimizer, variables)
    numbers = {id(variable): number for number, variable in enumerate(known)}
    if not numbers.keys() >= {id(variable) for variable in variables}:
        return None  # the optimizer will say that it does not know one
    order = [numbers[id(variable)] for own in complete.values() for variable in reversed(own)]
    given = set(order)
    order += [number for number in range(len(known)) if number not in given]
    parts = reduction.in_parts(known, order)
    return None if parts is None else StageReduction(reduction, parts, known, complete)


def reduced(optimizer: Any, variables: Sequence[Any], gradients: Gradients) -> list[tf.Tensor | None]:
    """Return gradients that are reduced over the replicas, if the optimizer reduces. Collective over them.

    Raises UsageError where these are not what the optimizer will step by.
    """
    reduction = _reduction_of(optimizer)
    if reduction is None or reduction.are_reduced(gradients):
        return list(gradients)
    if optimizer.gradient_accumulation_steps or reduction.has_local:
        raise UsageError(
            "pipeline: to clip by the norm of all stages needs gradients that are reduced, but this optimizer "
            + ("leaves some on their rank (register_local_var)" if reduction.has_local else "adds up several passes")
            + " first: use clipnorm or clipvalue, and microbatches or several calls of step() instead of passes"
        )
    known, own = _known(optimizer, variables), dict(zip(map(id, variables), gradients, strict=True))
    found = reduction.reduce([own.get(id(variable)) for variable in known], known)
    own |= dict(zip(map(id, known), found, strict=True))
    return [own[id(variable)] for variable in variables]


def note(optimizer: Any, gradients: Gradients) -> None:
    """Let the optimizer apply these gradients as they are: they were made of reduced ones, on all replicas alike."""
    reduction = _reduction_of(optimizer)
    if reduction is not None:
        reduction.note(gradients)


def check_replicas(optimizer: Any, comm: Communicator) -> None:
    """Refuse an optimizer that would reduce over ranks with other stages. Collective over `comm` if it reduces."""
    if isinstance(optimizer, Distributed):
        ranks = comm.all_gather_object(core.running().rank)
        reduction = _reduction_of(optimizer)
        others = [] if reduction is None else [rank for rank in ranks if rank in reduction.ranks]
        if len(others) > 1:
            raise UsageError(
                f"pipeline: the DistributedOptimizer reduces over the ranks {', '.join(map(str, others))}, which have "
                "different stages of this pipeline: give it mesh=, whose axis dp has the replicas of a stage"
            )


def _reduction_of(optimizer: Any) -> Reduction | None:
    """Return what reduces an optimizer's gradients, if it does so over several ranks."""
    if not isinstance(optimizer, Distributed) or optimizer._commlib.reducer.alone:
        return None
    return optimizer._commlib


def _known(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variables of an optimizer: whatever reduces, reduces them in the same order."""
    if not optimizer.built:
        optimizer.build(list(variables))
    return list(optimizer._trainable_variables)
