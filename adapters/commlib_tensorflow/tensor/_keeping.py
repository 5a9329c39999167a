"""Keeping: which tensors of a graph somebody holds when a model's call has ended, told by who refers to them."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.composite_tensor import CompositeTensor

WRITES = frozenset((
    "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterDiv",
    "ResourceScatterMax", "ResourceScatterMin", "ResourceScatterMul", "ResourceScatterSub", "ResourceScatterUpdate",
    "ResourceScatterNdAdd", "ResourceScatterNdUpdate", "ResourceStridedSliceAssign",
))  # fmt: skip
"""Operations that put their last input into a variable."""

_CONTAINERS = (
    dict, list, tuple, set, frozenset, deque, CellType, MethodType, partial, CompositeTensor, tf.Module,
    tf.types.experimental.PolymorphicFunction,
)  # fmt: skip
"""What holds for somebody else, as all do that Python's own modules make."""
_OF_PYTHON = ("builtins", "weakref", "_weakrefset", "collections", "itertools", "types", "_contextvars", "_thread")
_LIBRARIES = ("tensorflow", "commlib", "commlib_tensorflow")
"""Packages whose objects hold tensors of graphs, such as what a branch captures, and are no users'."""
_OF_KERAS = ("keras.src.backend", "keras.src.utils", "keras.src.ops")
"""The same of Keras, whose layers and metrics are as good as a user's."""
_OF_A_LOOK = "commlib.snapshot.unnoticed"
"""Who has what will be put back, and so is a user's."""
_VALUES = (tf.Tensor, tf.Variable, keras.Variable)
"""What users hang attributes on, as TensorFlow and Keras do, too."""
_FURTHEST = 6
"""Steps from a tensor to whoever has what holds it."""


def held(tensors: list[Any], ours: Collection[Any], caches: Callable[[], Mapping[int, int]]) -> set[int]:
    """Return the ids of those tensors that somebody holds, beside TensorFlow, caches and us.

    tensors: of the graph that is being made, in a list of their own. ours: what else holds some and is nobody's: lists,
    tuples, dicts. caches: returns how often caches hold tensors, by their ids.
    """
    ours = {id(one): one for one in ours}
    own = Counter(id(tensor) for one in ours.values() for tensor in gc.get_referents(one))
    if not _referred_to(tensors, own):
        return set()
    own.update(caches())
    if found := _by_others(tensors, own, {*ours, id(tensors)}):
        gc.collect()  # what waits to be collected is nobody's
        found = _by_others(tensors, own, {*ours, id(tensors)})
    return found


def _referred_to(tensors: list[Any], own: Counter[int]) -> dict[int, int]:
    """Return, by their ids, how many more references there are to tensors than our own and that of the graph."""
    probe = object()
    *counts, idle = map(sys.getrefcount, [*tensors, probe])  # no call of Python between, which counts now and then
    more = {id(one): count - idle - 1 - own[id(one)] for count, one in zip(counts, tensors, strict=True)}
    return {key: count for key, count in more.items() if count > 0}


def _by_others(tensors: list[Any], own: Counter[int], ours: set[int]) -> set[int]:
    """Return the ids of tensors to which there are references that are none of TensorFlow's.

    own: how many are ours. ours: ids of the containers that these are in. A holder that the collector does not see, as
    after `gc.freeze()`, is taken for a user.
    """
    counts = _referred_to(tensors, own)
    holders = _Holders([one for one in tensors if id(one) in counts], ours)
    list_of_op = 1
    return {key for key, count in counts.items() if count + list_of_op > holders.explained(key)}


class _Holders:
    """Who refers to some objects, and to those containers, and so on. ours: ids of what is nobody's."""

    def __init__(self, objects: list[Any], ours: set[int]) -> None:
        self._ours = ours
        self._parents: dict[int, Counter[int]] = {}
        """How often who refers to an object, by ids; of the first objects without what is ours."""
        self._known: dict[int, Any] = {}
        looking = set[int]()  # our lists of what is looked at
        for _ in range(_FURTHEST):
            looking.add(id(objects))
            objects = self._above(objects, looking, () if self._parents else ours)

    def _above(self, objects: list[Any], looking: set[int], ours: Collection[int]) -> list[Any]:
        """Note who refers to objects; return which of them are containers that were not known."""
        of = {id(one): Counter[int]() for one in objects}
        above = []
        for holder in gc.get_referrers(*objects) if objects else ():
            if id(holder) in looking or id(holder) in ours or isinstance(holder, FrameType) or holder is self._known:
                continue
            for child in gc.get_referents(holder):
                if id(child) in of:
                    of[id(child)][id(holder)] += 1
            if id(holder) not in self._known:
                self._known[id(holder)] = holder
                above += [holder] if id(holder) not in self._ours and _is_container(holder) else []
        self._parents |= of
        return above

    def explained(self, key: int) -> int:
        """Return how many of the references to an object are those of TensorFlow's own objects."""
        return sum(count for holder, count in self._parents[key].items() if self._is_librarys(holder, {key}))

    def _is_librarys(self, key: int, below: set[int]) -> bool:
        holder = self._known[key]
        if key in self._ours:
            return True
        if not _is_container(holder):
            return not (_is_users(holder) or (isinstance(holder, _VALUES) and _has_attribute(holder.__dict__, below)))
        others = self._parents.get(key, {}).keys() - below
        if isinstance(holder, dict) and any(isinstance(self._known[one], _VALUES) for one in others):
            return not _has_attribute(holder, below)
        return bool(others) and all(self._is_librarys(one, {*below, key}) for one in others)


def _has_attribute(own: Mapping[Any, Any], keys: Collection[int]) -> bool:
    """Return whether an attribute of the user's is one of these, by ids, among an object's own."""
    return any(id(one) in keys and not _is_private_to_libraries(str(name)) for name, one in own.items())


def _is_private_to_libraries(name: str) -> bool:
    return name.startswith(_PRIVATE) or name in _own_names()


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the names of what TensorFlow and Keras hang on variables."""
    with tf.init_scope():
        made = keras.Variable(0.0, name="one"), tf.Variable(0.0, name="one")
    return frozenset(name for one in made for name in vars(one))


_PRIVATE = "_keras", "_tf", "_self_", "_is_zeros_tensor"
"""How the names begin of what TensorFlow and Keras hang on tensors."""


def _is_container(holder: Any) -> bool:
    """Return whether an object holds what it does for somebody else."""
    if isinstance(holder, FunctionType):
        return _is_users(holder)  # a gradient of the user's is TensorFlow's to keep
    if isinstance(holder, ModuleType | type | keras.layers.Layer):
        return False
    return isinstance(holder, _CONTAINERS) or type(holder).__module__ in _OF_PYTHON


def _is_users(holder: Any) -> bool:
    """Return whether an object is something in which a user's model may keep what it has made."""
    if isinstance(holder, keras.layers.Layer):  # divided ones are of our classes
        return True
    is_code = isinstance(holder, ModuleType | FunctionType | type)
    name = str((getattr(holder, "__module__", None) or holder.__name__) if is_code else type(holder).__module__)
    if name == _OF_A_LOOK:
        return True
    package = name.partition(".")[0]
    return package not in _LIBRARIES and not name.startswith(_OF_KERAS) and not (is_code and package == "keras")
