"""The verbs on tensors, said once: an adapter says how its tensors become arrays and back.

_verb = VerbMaker(__name__, "Tensor")
_ordered = OrderedVerbs(Bridge(Tensor, read, new))
all_reduce, all_reduce_async = _verb(_ordered.all_reduce)
"""

from __future__ import annotations

from commlib.tensor_verbs.call import NOTHING, OBJECT, RECEIVED, ROWS, SAME, Bridge, Call, Place, Startable
from commlib.tensor_verbs.either import check_ordered, choose_root
from commlib.tensor_verbs.maker import VerbMaker
from commlib.tensor_verbs.ordered import OrderedVerbs, ReturningVerbs, WritingVerbs
from commlib.tensor_verbs.work import TensorWork

__all__ = [
    "NOTHING",
    "OBJECT",
    "RECEIVED",
    "ROWS",
    "SAME",
    "Bridge",
    "Call",
    "OrderedVerbs",
    "Place",
    "ReturningVerbs",
    "Startable",
    "TensorWork",
    "VerbMaker",
    "WritingVerbs",
    "check_ordered",
    "choose_root",
]
