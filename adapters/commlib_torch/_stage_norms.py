"""Norms over stages: gradients of a pipeline are those of all its ranks, of which each has some."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from commlib.communicator import Communicator
from commlib.errors import UsageError

_pipelines: list[tuple[weakref.ref[Any], Communicator, Callable[[Tensor], bool]]] = []
"""Those that live, in the order in which all ranks make them."""


def note_stages(pipe: Any, comm: Communicator, is_counted_elsewhere: Callable[[Tensor], bool]) -> None:
    """Let norms of all parameters of a pipeline be those of all its stages."""
    _pipelines[:] = [known for known in _pipelines if known[0]() is not None]
    _pipelines.append((weakref.ref(pipe), comm, is_counted_elsewhere))


def by_stages(parameters: Sequence[Tensor]) -> Iterator[tuple[Communicator | None, list[Tensor]]]:
    """Yield parameters that count in a norm, with the ranks that have others of the same model, None if nobody has.

    Those of a pipeline are taken for all of the model if they are all of this rank that have gradients; else they are
    some, which are looked at by themselves, such as those of one layer.
    """
    left = {id(parameter): parameter for parameter in parameters}
    for pipe, comm, is_counted_elsewhere in list(_pipelines):
        own = _own(pipe)
        if own and all(id(one) in left for one in own):
            yield comm, [one for one in own if not is_counted_elsewhere(one)]
            for one in own:
                del left[id(one)]
    yield None, list(left.values())


def refuse_whole_stages(gradients: Iterable[Tensor]) -> None:
    """Raise UsageError for all gradients that this rank's stages have, whose norm would be taken for the model's."""
    if not _pipelines:
        return
    given = {id(gradient) for gradient in gradients}
    for pipe, comm, _ in _pipelines:
        own = [one.grad for one in _own(pipe) if one.grad is not None]
        if own and all(id(one) in given for one in own):
            raise UsageError(
                f"torch.nn.utils: the norm of the gradients of rank {comm.rank} of {comm.name} alone, the stages of a "
                "pipeline that this rank has: clip by pipe.clip_grad_norm, commlib_torch.clip_grad_norm_ or a "
                "DistributedOptimizer's clip_grad_norm, whose norm is that of all stages"
            )


def _own(pipe: weakref.ref[Any]) -> list[Tensor]:
    """Return the parameters of this rank's stages that may have gradients, or the one that stands for none."""
    found = pipe()
    if found is None:
        return []
    parameters = list(found.parameters())
    return [one for one in parameters if one.requires_grad or one.grad is not None] or parameters
