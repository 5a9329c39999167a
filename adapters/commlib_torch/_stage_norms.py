"""Norms over stages: the norm of a pipeline's gradients covers all its ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from commlib.communicator import Communicator
from commlib.errors import UsageError

_pipelines: list[tuple[weakref.ref[Any], Communicator, Callable[[Tensor], bool]]] = []
"""Live pipelines, in the order in which all ranks make them."""


def note_stages(pipe: Any, comm: Communicator, is_counted_elsewhere: Callable[[Tensor], bool]) -> None:
    """Make norms of all parameters of a pipeline cover all its stages."""
    _pipelines[:] = [known for known in _pipelines if known[0]() is not None]
    _pipelines.append((weakref.ref(pipe), comm, is_counted_elsewhere))


def group_by_stages(parameters: Sequence[Tensor]) -> Iterator[tuple[Communicator | None, list[Tensor]]]:
    """Yield groups of parameters of a norm, with the ranks that have the other stages; None for a local group.

    Parameters of a pipeline represent the whole model if they include all of this rank's that have gradients. Otherwise
    they are a local selection, such as those of one layer.
    """
    left = {id(parameter): parameter for parameter in parameters}
    for pipe, comm, is_counted_elsewhere in list(_pipelines):
        own = _own_parameters(pipe)
        if own and all(id(one) in left for one in own):
            yield comm, [one for one in own if not is_counted_elsewhere(one)]
            for one in own:
                del left[id(one)]
    yield None, list(left.values())


def refuse_whole_stages(gradients: Iterable[Tensor]) -> None:
    """Raise UsageError for all gradients of this rank's stages: their norm would be mistaken for the model's."""
    if not _pipelines:
        return
    given = {id(gradient) for gradient in gradients}
    for pipe, comm, _ in _pipelines:
        own = [one.grad for one in _own_parameters(pipe) if one.grad is not None]
        if own and all(id(one) in given for one in own):
            raise UsageError(
                f"torch.nn.utils: this would be the norm of the gradients of rank {comm.rank} of {comm.name} only, "
                "which has some stages of a pipeline: clip with pipe.clip_grad_norm, commlib_torch.clip_grad_norm_ or "
                "a DistributedOptimizer's clip_grad_norm, whose norms cover all stages"
            )


def _own_parameters(pipe: weakref.ref[Any]) -> list[Tensor]:
    """Return the parameters of this rank's stages that may have gradients, or the placeholder of a rank without any."""
    pipeline = pipe()
    if pipeline is None:
        return []
    parameters = list(pipeline.parameters())
    return [one for one in parameters if one.requires_grad or one.grad is not None] or parameters
