"""Queries: return rank, size and the like as tensors. A traced function evaluates them when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.horovod.process_sets import registry
from commlib_tensorflow._host_calls import Spec, call, no_autograph

__all__ = ("local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op")


@no_autograph
def rank_op(name: str | None = None) -> Any:
    """Return this process's global rank as an int32 tensor.

    Args:
        name: The name of the node in the graph.

    Examples:
        >>> int(ct.rank_op()) == comm.rank
        True
    """
    return _evaluate(core.rank, name)


@no_autograph
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set as an int32 tensor; 0 if there is no such set.

    Args:
        process_set_id: `process_set_id` of a registered set; 0: all ranks.
        name: The name of the node in the graph.

    Examples:
        >>> int(ct.size_op())
        2
    """

    def size() -> int:
        ranks = registry().sets.get(process_set_id)
        return 0 if ranks is None else ranks.size() or 0

    return _evaluate(size, name)


@no_autograph
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank within its node as an int32 tensor.

    Args:
        name: The name of the node in the graph.

    Examples:
        >>> int(ct.local_rank_op()) in (0, 1)
        True
    """
    return _evaluate(core.local_rank, name)


@no_autograph
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this node as an int32 tensor.

    Args:
        name: The name of the node in the graph.

    Examples:
        >>> int(ct.local_size_op()) in (1, 2)
        True
    """
    return _evaluate(core.local_size, name)


@no_autograph
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is in a process set, 0 if not, -1 before `init`, -2 if there is no such set (int32).

    Args:
        process_set_id: `process_set_id` of a registered set; 0: all ranks.
        name: The name of the node in the graph.

    Examples:
        >>> int(ct.process_set_included_op())
        1
    """

    def included() -> int:
        if not core.is_initialized():
            return -1
        ranks = registry().sets.get(process_set_id)
        return -2 if ranks is None else int(bool(ranks.included()))

    return _evaluate(included, name)


def _evaluate(question: Callable[[], int], name: str | None) -> Any:
    (answer,) = call(lambda: [np.array(question(), np.int32)], [], [Spec(tf.int32, ())])
    return answer if name is None else tf.identity(answer, name)
