"""Tensor verbs for all frameworks: an adapter only converts its tensors to arrays and back.

_verb = VerbMaker(__name__, "Tensor")
_ordered = OrderedVerbs(Bridge(Tensor, read, new))
all_reduce, all_reduce_async = _verb(_ordered.all_reduce)
"""

from __future__ import annotations

from commlib.tensor_verbs.call import (
    NOTHING,
    OBJECT,
    RECEIVED,
    ROWS,
    SAME,
    Bridge,
    ResultOrZeros,
    Startable,
    TargetTensor,
    TensorCall,
)
from commlib.tensor_verbs.gradients import WITH_GRADIENT, CallNumbers, VerbGradients
from commlib.tensor_verbs.ordered_verbs import OrderedVerbs, ReturningVerbs, WritingVerbs
from commlib.tensor_verbs.tensor_work import TensorWork
from commlib.tensor_verbs.verb_arguments import check_named, check_ordered, choose_root
from commlib.tensor_verbs.verb_maker import VerbMaker

__all__ = [
    "NOTHING",
    "OBJECT",
    "RECEIVED",
    "ROWS",
    "SAME",
    "WITH_GRADIENT",
    "Bridge",
    "CallNumbers",
    "ResultOrZeros",
    "TensorCall",
    "OrderedVerbs",
    "TargetTensor",
    "ReturningVerbs",
    "Startable",
    "TensorWork",
    "VerbGradients",
    "VerbMaker",
    "WritingVerbs",
    "check_named",
    "check_ordered",
    "choose_root",
]
