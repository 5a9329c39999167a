"""Precompilation: list every host kernel with its argument types, to compile it before its first call.

A kernel is compiled for the types of its first call. For plain numbers, its annotations give the types; for arrays, the
table in this module does. Nothing is executed, so kernels may be compiled for another CPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import types

from commlib.dtypes import BITWISE, COMPLEX, DTYPES, FLOATS, HALVES, INTEGERS, OPERATIONS, kernel_operation
from commlib.kernels import host, machine_code
from commlib.kernels.cache import folder as folder
from commlib.kernels.host import rows
from commlib.kernels.reductions import reduction_name

_NUMBERS = {"int": types.int64, "bool": types.boolean, "float": types.float64}

_i, _b, _f = types.int64, types.boolean, types.float64
_F, _U, _I, _L, _D, _B = (
    kind[::1] for kind in (types.float32, types.uint32, types.int32, types.int64, types.float64, types.boolean)
)
_F2, _I2, _L2, _D2 = (kind[:, ::1] for kind in (types.float32, types.int32, types.int64, types.float64))

ENTRY_POINTS = (
    "builtins.call", "call_routes.begin", "call_routes.begin_on_arrays", "call_routes.run", "call_routes.run_on_arrays",
    "channel.free_slot", "channel.has_arrived", "channel.let_go", "channel.put", "channel.put_reserved",
    "channel.release", "channel.release_slot", "channel.reserve", "channel.take", "exact_mean.join_halves",
    "exact_mean.split_halves", "gate.run_plan", "gate.run_verb", "network_channel.free_slot", "network_channel.put",
    "network_channel.release",
    "network_channel.take", "network_channel.take_turn", "node.all_equal", "node.barrier", "node.copy_from_array",
    "node.copy_to_array", "pack.copy_all", "reduce.reduce_as_written", "ring_posts.forget", "ring_posts.move_posts",
    "ring_posts.post", "ring_posts.read_field", "ring_posts.withdraw", "ring_put.announce", "ring_put.put",
    "ring_put.put_bytes", "ring_take.look", "ring_take.take", "ring_unexpected.move_unexpected",
    "ring_unexpected.unexpected_units", "rounds.play", "shm_ring.follow_ring", "shm_ring.halt", "shm_ring.has_moved",
    "stream.stream_copy", "uneven_exchange.run", "uneven_exchange.run_on_arrays",
)  # fmt: skip
"""The kernels that Python calls as machine code."""

# By module and name. Kernels that only other kernels call are compiled with their callers.
ARRAYS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "draw.draw": ((_i, _i, _U),),
    "draw.take": ((_i, _i, _i, _i, _U, _f, _F),),
    "low_rank.expand": ((_F, _F, _i, _i, _F, _F, _F, _i),),
    "low_rank.project": ((_F, _F, _i, _i, _F, _F, _i),),
    "low_rank.project_back": ((_F, _i, _i, _F, _F, _i),),
    "moments.accumulate": ((_F, _F, _F, _F, _f, _f, _f),),
    "moments.add": ((_F, _f, _F),),
    "moments.advance": ((_F, _F, _F, _f, _f, _f, _f, _f),),
    "moments.blend": ((_F, _F, _F, _f, _f, _f),),
    "moments.directions": ((_F, _F, _F, _f, _f, _f),),
    "moments.follow": ((_F, _F, _F, _f, _f),),
    "moments.largest_ratio": ((_F, _F, _f, _f, _f),),
    "moments.raise_to": ((_F, _f),),
    "orthonormal.dot": ((_F, _F),),
    "orthonormal.orthonormalise": ((_F, _i, _f),),
    "token_routing.assign": ((_F2, _I2, _b, _f, _I, _F, _L, _I, _I, _D),),
    "token_routing.choose": ((_F2, _F2, _b, _B, _i, _F, _i, _i, _i, _i, _F2, _I2, _L2, _D2, _L, _D2),),
    "token_routing.drop_late": ((_I2, _i, _L2),),
    "token_routing.gradient": ((_F2, _F2, _B, _i, _I, _I, _I, _D, _b, _f, _F, _D2, _i, _D, _F2),),
    "dispatch_plan.bytes_needed": ((_I, _i, _b, _L, _L, _L),),
    "dispatch_plan.find_rows": ((_I, _I, _i, _i, _L2, _L, _i, _F, _L, _F),),
    "dispatch_plan.read_choices": ((_L2, _i, _L),),
    "dispatch_plan.publish_rows": ((_I, _I, _I, _i, _i, _i, _i),),
    "dispatch_plan.put_rows": ((_I, _I, _i, _i, _i, _L2, _L),),
    "dispatch_plan.take_numbers": ((_I, _I, _i, _i, _L2, _L, _F, _F),),
    "dispatch_plan.write_block": tuple((counts, _I, _I, _i, _I, _I, _I, _I) for counts in (_L2, types.int64[:, :])),
    "select.keep_largest": ((_U, _U, _i, _i),),
    "sparse.write": ((_U, _U, _i, _i, _i),),
    "row_exchange.count_moved_rows": ((_L2, _I, _i, _L, _L),),
    "row_exchange.order_numbers": ((_I, _I, _F, _F, _F),),
    "row_exchange.take_moved_rows": ((_L2, _I, _I, _i, _F, _F),),
    "row_exchange.write_places": ((_L2, _I, _I, _i, _I, _I, _I, _I, _I, _I, _I),),
}

USUAL = dict.fromkeys(FLOATS, ("sum", "mean", "min", "max")) | {
    "int32": ("sum", "max"),
    "int64": ("sum", "min", "max", "and", "or"),
    "uint8": ("sum", "and", "or"),
    "bool": ("and", "or"),
}
"""Common reductions in training: of gradients, metrics, counts and flags."""


@dataclass(frozen=True, slots=True)
class CompileTask:
    """One specialization of a kernel. `compile()` compiles or loads it, and returns the name of its cache file."""

    name: str
    compile: Callable[[], str]


def tasks(*, rare: bool = True) -> Iterator[CompileTask]:
    """Yield all specializations, always in the same order. rare: include reductions that training hardly ever uses."""
    for dtype in DTYPES if rare else USUAL:
        for operation in dict.fromkeys(_operations(dtype)) if rare else USUAL[dtype]:
            yield CompileTask(f"reduce {dtype} {operation}", partial(_reduction, dtype, operation))
    if rare:
        yield CompileTask(f"reduce {HALVES} sum", partial(_reduction, HALVES, "sum"))
    yield from (CompileTask(name, partial(_machine_code, name)) for name in ENTRY_POINTS)
    only_machine_code = {name.partition(".")[0] for name in ENTRY_POINTS}
    for name, dispatcher in dispatchers():
        if name.partition(".")[0] in only_machine_code:
            continue
        for number, signature in enumerate(ARRAYS.get(name, _number_signatures(dispatcher))):
            yield CompileTask(f"{name} {number}" if number else name, partial(_kernel, dispatcher, signature))
    for kind in FLOATS:
        yield CompileTask(f"squares {kind}", partial(_machine_code, f"norm.squares-{kind}"))
        stored = {"float16": types.uint16, "bfloat16": types.uint16}.get(kind) or getattr(types, kind)
        table = stored[:, ::1]
        for factory, signature in (
            (rows._summing, (table, _I, _I, _L, _F)),
            (rows._scaling, (_I, _I, _I, _i, table, _F, _i)),
            (rows._products, (table, table, _F, table, _F)),
        ):
            dispatcher = factory(kind)
            yield CompileTask(f"{dispatcher.py_func.__name__} {kind}", partial(_kernel, dispatcher, signature))


def dispatchers() -> Iterator[tuple[str, Any]]:
    """Yield the module-level kernels as (name, dispatcher), with names such as "module.name"."""
    for module in pkgutil.iter_modules(host.__path__):
        loaded_module = importlib.import_module(f"{host.__name__}.{module.name}")
        for value in vars(loaded_module).values():
            function = getattr(value, "py_func", None)
            is_cached = hasattr(getattr(value, "_cache", None), "_name")  # others are compiled into their callers
            if is_cached and function is not None and function.__module__ == loaded_module.__name__:
                yield f"{module.name}.{function.__name__}", value


def _kernel(dispatcher: Any, signature: tuple[Any, ...]) -> str:
    dispatcher.compile(signature)
    return str(dispatcher._cache._name(signature, dispatcher.targetctx.codegen()))


def _reduction(dtype: str, operation: str) -> str:
    return _machine_code(reduction_name(dtype, operation))


def _machine_code(name: str) -> str:
    machine_code.address(name)
    return machine_code.file_name(name)


def _number_signatures(dispatcher: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the types of a kernel that takes only numbers; an empty tuple for other kernels."""
    kinds = [text for name, text in dispatcher.py_func.__annotations__.items() if name != "return"]
    return (tuple(_NUMBERS[kind] for kind in kinds),) if set(kinds) <= _NUMBERS.keys() else ()


def _operations(dtype: str) -> Iterator[str]:
    for operation in OPERATIONS:
        if not ((dtype in COMPLEX and operation in ("min", "max")) or (dtype, operation) == ("bool", "mean")):
            yield kernel_operation(dtype, operation)
    if dtype in INTEGERS:
        yield from BITWISE
