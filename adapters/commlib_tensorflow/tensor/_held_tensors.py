"""Held tensors: find the graph tensors that user code still holds after a model's call, by their referrers."""

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
"""Operations that write their last input into a variable."""

_CONTAINERS = (
    dict, list, tuple, set, frozenset, deque, CellType, MethodType, partial, CompositeTensor, tf.Module,
    tf.types.experimental.PolymorphicFunction,
)  # fmt: skip
"""Containers: they hold objects on behalf of others, like all objects of Python's own modules."""
_OF_PYTHON = ("builtins", "weakref", "_weakrefset", "collections", "itertools", "types", "_contextvars", "_thread")
_LIBRARIES = ("tensorflow", "commlib", "commlib_tensorflow")
"""Packages whose objects hold graph tensors, such as captures of a branch, without being user code."""
_OF_KERAS = ("keras.src.backend", "keras.src.utils", "keras.src.ops")
"""The same for Keras, whose layers and metrics count as user code."""
_OF_A_LOOK = "commlib.snapshot.trial_run"
"""The trial run holds user values to restore, so its holders count as user code."""
_VALUES = (tf.Tensor, tf.Variable, keras.Variable)
"""Objects to which users attach attributes, as TensorFlow and Keras do, too."""
_FURTHEST = 6
"""Most steps from a tensor up to the owner of its holders."""


def find_held(tensors: list[Any], ours: Collection[Any], caches: Callable[[], Mapping[int, int]]) -> set[int]:
    """Return the ids of the tensors that user code holds, besides TensorFlow, caches and commlib.

    tensors: of the graph being made, in a separate list. ours: other lists, tuples and dicts that hold some and do not
    count. caches: returns how often caches hold tensors, by their ids.
    """
    ours = {id(one): one for one in ours}
    own = Counter(id(tensor) for one in ours.values() for tensor in gc.get_referents(one))
    if not _reference_counts(tensors, own):
        return set()
    own.update(caches())
    if held := _held_by_users(tensors, own, {*ours, id(tensors)}):
        gc.collect()  # garbage does not count
        held = _held_by_users(tensors, own, {*ours, id(tensors)})
    return held


def _reference_counts(tensors: list[Any], own: Counter[int]) -> dict[int, int]:
    """Return, by id, the number of references to tensors, without commlib's own and the graph's."""
    probe = object()
    *counts, idle = map(sys.getrefcount, [*tensors, probe])  # no Python call in between: it may add a reference
    more = {id(one): count - idle - 1 - own[id(one)] for count, one in zip(counts, tensors, strict=True)}
    return {key: count for key, count in more.items() if count > 0}


def _held_by_users(tensors: list[Any], own: Counter[int], ours: set[int]) -> set[int]:
    """Return the ids of tensors with references that are not TensorFlow's.

    own: the number of commlib's references. ours: ids of the containers that hold them. A holder that the garbage
    collector does not see, as after `gc.freeze()`, counts as user code.
    """
    counts = _reference_counts(tensors, own)
    holders = _Holders([one for one in tensors if id(one) in counts], ours)
    list_of_op = 1
    return {key for key, count in counts.items() if count + list_of_op > holders.explained(key)}


class _Holders:
    """Referrers of some objects, of the containers among these referrers, and so on. ours: ids that do not count."""

    def __init__(self, objects: list[Any], ours: set[int]) -> None:
        self._ours = ours
        self._parents: dict[int, Counter[int]] = {}
        """How often each referrer refers to an object, by ids; for the first objects without `ours`."""
        self._known: dict[int, Any] = {}
        looking = set[int]()  # the lists of this search
        for _ in range(_FURTHEST):
            looking.add(id(objects))
            objects = self._above(objects, looking, () if self._parents else ours)

    def _above(self, objects: list[Any], looking: set[int], ours: Collection[int]) -> list[Any]:
        """Record the referrers of objects; return the new containers among them."""
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
        """Return the number of references to an object from TensorFlow's own objects."""
        return sum(count for holder, count in self._parents[key].items() if self._is_library_owned(holder, {key}))

    def _is_library_owned(self, key: int, below: set[int]) -> bool:
        holder = self._known[key]
        if key in self._ours:
            return True
        if not _is_container(holder):
            return not (_is_users(holder) or (isinstance(holder, _VALUES) and _has_attribute(holder.__dict__, below)))
        others = self._parents.get(key, {}).keys() - below
        if isinstance(holder, dict) and any(isinstance(self._known[one], _VALUES) for one in others):
            return not _has_attribute(holder, below)
        return bool(others) and all(self._is_library_owned(one, {*below, key}) for one in others)


def _has_attribute(own: Mapping[Any, Any], keys: Collection[int]) -> bool:
    """Return whether a user-set attribute of an object is one of these, by ids."""
    return any(id(one) in keys and not _is_private_to_libraries(str(name)) for name, one in own.items())


def _is_private_to_libraries(name: str) -> bool:
    return name.startswith(_PRIVATE) or name in _own_names()


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the names of the attributes that TensorFlow and Keras attach to variables."""
    with tf.init_scope():
        variables = keras.Variable(0.0, name="one"), tf.Variable(0.0, name="one")
    return frozenset(name for one in variables for name in vars(one))


_PRIVATE = "_keras", "_tf", "_self_", "_is_zeros_tensor"
"""Prefixes of the attributes that TensorFlow and Keras attach to tensors."""


def _is_container(holder: Any) -> bool:
    """Return whether an object holds its contents on behalf of another object."""
    if isinstance(holder, FunctionType):
        return _is_users(holder)  # TensorFlow may keep a user's gradient function
    if isinstance(holder, ModuleType | type | keras.layers.Layer):
        return False
    return isinstance(holder, _CONTAINERS) or type(holder).__module__ in _OF_PYTHON


def _is_users(holder: Any) -> bool:
    """Return whether an object is one in which a user's model may store its results."""
    if isinstance(holder, keras.layers.Layer):  # sharded ones have classes of commlib
        return True
    is_code = isinstance(holder, ModuleType | FunctionType | type)
    name = str((getattr(holder, "__module__", None) or holder.__name__) if is_code else type(holder).__module__)
    if name == _OF_A_LOOK:
        return True
    package = name.partition(".")[0]
    return package not in _LIBRARIES and not name.startswith(_OF_KERAS) and not (is_code and package == "keras")
