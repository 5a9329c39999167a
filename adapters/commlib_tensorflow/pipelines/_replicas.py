"""Replicas: a distributed optimizer reduces the gradients of a pipeline's stages over the replicas of each stage.

It reduces when it is applied. Gradients that were reduced earlier are recorded, and not reduced again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib_tensorflow._eager_call import EagerCall
from commlib_tensorflow._keras_reduction import DistributedMixin, KerasGradients

Gradients = Sequence[tf.Tensor | None]
ByStages = Callable[[Mapping[int, Sequence[Any]]], "StageReduction | None"]
"""Given the variables whose gradients each stage completes: start the reduction of a step."""


class StageReduction:
    """Reduction of this rank's gradients in one step, stage by stage.

    variables: the optimizer's, in its order. complete: the variables whose gradients each stage completes.
    """

    def __init__(
        self,
        reduction: KerasGradients,
        parts: EagerCall,
        variables: Sequence[Any],
        complete: Mapping[int, Sequence[Any]],
    ) -> None:
        self._reduction, self._parts, self._variables, self._complete = reduction, parts, variables, complete
        self._left = {id(variable): number for number, variable in enumerate(variables)}

    def give(self, stage: int, gradients: Mapping[int, tf.Tensor]) -> None:
        """Reduce the gradients that this stage completes. gradients: by the id of the variable."""
        self._give({id(variable) for variable in self._complete[stage]}, gradients)

    def finish(self, gradients: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Reduce the rest, and return all gradients, reduced. Collective over the replicas."""
        self._give(set(gradients), gradients)
        reduced = {id(self._variables[number]): gradient for number, gradient in self._parts.finish().items()}
        if reduced:
            self._reduction.note(list(reduced.values()))
        return reduced

    def _give(self, keys: set[int], gradients: Mapping[int, tf.Tensor]) -> None:
        for key in [key for key in self._left if key in keys and key in gradients]:
            self._parts.put(self._left.pop(key), gradients[key])


def start_by_stages(
    optimizer: Any, variables: Sequence[Any], complete: Mapping[int, Sequence[Any]]
) -> StageReduction | None:
    """Start to reduce the gradients of a step by stages, in the order of completion; None if that is impossible.

    variables: all of this rank, in their order. complete: those that each stage completes, in the order of the stages'
    last gradients. Collective over the replicas.
    """
    reduction = _reduction_of(optimizer)
    if reduction is None or optimizer.gradient_accumulation_steps or not variables:
        return None
    known = _variables_of(optimizer, variables)
    numbers = {id(variable): number for number, variable in enumerate(known)}
    if not numbers.keys() >= {id(variable) for variable in variables}:
        return None  # the optimizer itself will refuse the unknown one
    order = [numbers[id(variable)] for own in complete.values() for variable in reversed(own)]
    given = set(order)
    order += [number for number in range(len(known)) if number not in given]
    parts = reduction.by_parts(known, order)
    return None if parts is None else StageReduction(reduction, parts, known, complete)


def reduce_over_replicas(optimizer: Any, variables: Sequence[Any], gradients: Gradients) -> list[tf.Tensor | None]:
    """Return gradients reduced over the replicas, if the optimizer reduces. Collective over the replicas.

    Raises UsageError if the optimizer will step with other gradients.
    """
    reduction = _reduction_of(optimizer)
    if reduction is None or reduction.are_reduced(gradients):
        return list(gradients)
    if optimizer.gradient_accumulation_steps or reduction.has_local:
        raise UsageError(
            "pipeline: clipping by the norm of all stages needs reduced gradients, but this optimizer "
            + ("leaves some on their rank (register_local_var)" if reduction.has_local else "adds up several passes")
            + " first: use clipnorm or clipvalue, and microbatches or several calls of step() instead of passes"
        )
    known, own = _variables_of(optimizer, variables), dict(zip(map(id, variables), gradients, strict=True))
    reduced = reduction.reduce([own.get(id(variable)) for variable in known], known)
    own |= dict(zip(map(id, known), reduced, strict=True))
    return [own[id(variable)] for variable in variables]


def note(optimizer: Any, gradients: Gradients) -> None:
    """Make the optimizer apply gradients unreduced: they derive from reduced ones, equal on all replicas."""
    reduction = _reduction_of(optimizer)
    if reduction is not None:
        reduction.note(gradients)


def check_replicas(optimizer: Any, comm: Communicator) -> None:
    """Refuse an optimizer that would reduce over ranks with other stages. Collective over `comm` if it reduces."""
    if isinstance(optimizer, DistributedMixin):
        ranks = comm.all_gather_object(core.require_world().rank)
        reduction = _reduction_of(optimizer)
        others = [] if reduction is None else [rank for rank in ranks if rank in reduction.ranks]
        if len(others) > 1:
            raise UsageError(
                f"pipeline: the DistributedOptimizer reduces over the ranks {', '.join(map(str, others))}, which have "
                "different stages of this pipeline: give it mesh=, whose axis dp connects the replicas of a stage"
            )


def _reduction_of(optimizer: Any) -> KerasGradients | None:
    """Return the reduction of an optimizer, if it reduces over several ranks."""
    if not isinstance(optimizer, DistributedMixin) or optimizer._commlib.reducer.alone:
        return None
    return optimizer._commlib


def _variables_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variables of an optimizer: every reduction uses their order."""
    if not optimizer.built:
        optimizer.build(list(variables))
    return list(optimizer._trainable_variables)
