"""Arguments for every kernel, for tests on a GPU: few of each kind, including those that need a rule."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from commlib.dtypes import BITWISE, DTYPES, FLOATS, INTEGERS, NUMPY, kernel_operation
from commlib.kernels.host import sparse as host_sparse
from commlib.kernels.host.table import VALUES, HostKernels
from commlib.kernels.protocol import Code
from tests.cuda.hard import values
from tests.oracles.oracle import REDUCIBLE
from tests.unit.kernels.cuda.test_arithmetic import CASTS, convertible
from tests.unit.kernels.cuda.test_blocks import between_orders
from tests.unit.kernels.cuda.test_codes import CASES as QUANTISED
from tests.unit.kernels.cuda.test_codes import SIGNED, between_codes, hard
from tests.unit.kernels.cuda.test_sparse import misleading, values_of

HOST = HostKernels()
COUNT = 5000

# make_NAME yields arguments of the kernel NAME.


def make_reduce():
    for dtype, op in [*REDUCIBLE, *itertools.product(INTEGERS, BITWISE)]:
        for inputs, length in ((1, 700), (2, 33), (3, 4001)):
            operands = [values(dtype, length, seed) for seed in range(inputs)]
            yield dtype, kernel_operation(dtype, op), 3, operands, values(dtype, length, 9)
    few = [values("bfloat16", 700, seed) for seed in range(40)]
    yield "bfloat16", "sum", 1, few, few[7]


def make_reduce_to():
    for dtype in DTYPES:
        operands = [values(dtype, 4001, seed) for seed in range(3)]
        yield dtype, kernel_operation(dtype, "sum"), 1, operands, [*operands[:2], values(dtype, 4001, 5)]


def make_cast():
    for source, target in CASTS[::3]:
        x = convertible(source, target)
        yield x, np.zeros(len(x), NUMPY[target])


def make_fill():
    for dtype, value in itertools.product(DTYPES, (0, 1)):
        yield values(dtype, 700, 0), value


def make_scale():
    for dtype in DTYPES:
        if NUMPY[dtype].kind != "c":  # whose products numpy rounds otherwise: tests/unit/kernels/cuda
            yield values(dtype, 700, 0), 0.5 if dtype in FLOATS else 3.0


def make_pack():
    arrays = [values(dtype, length, 1) for dtype, length in zip(DTYPES, itertools.count(1), strict=False)] * 20
    yield arrays, np.zeros(sum(array.nbytes for array in arrays), np.uint8)


def make_unpack():
    arrays = [np.zeros_like(values(dtype, 30, 1)) for dtype in DTYPES]
    yield values("uint8", sum(array.nbytes for array in arrays), 3), arrays


def make_squares():
    for dtype in FLOATS:
        yield (np.arange(300_001) % 120).astype(NUMPY[dtype]),  # exact, in any order  # fmt: skip


def make_is_finite():
    for bad in (0.0, np.inf, -np.inf, np.nan):
        x = values_of("normal", COUNT)
        x[COUNT - 1] = bad
        yield (x,)


def make_add_momentum():
    for nesterov in (False, True):
        yield *(values_of("normal", COUNT, seed) for seed in range(3)), 0.3, 0.9, nesterov


def residuals(count: int, *, in_place: bool = True) -> list[tuple[Any, Any]]:
    """Return residuals before and after: none, two arrays, and the same array twice."""
    one = values_of("normal", count, 9)
    return [(None, None), (one.copy(), np.zeros(count, np.float32)), *[(one, one)] * in_place]


def make_narrow():
    for bfloat, (before, after) in itertools.product((False, True), residuals(COUNT)):
        yield hard(COUNT, 500, 0), before, after, np.zeros(2 * COUNT, np.uint8), bfloat


def make_widen():
    for bfloat, add in itertools.product((False, True), repeat=2):
        yield np.arange(1 << 16, dtype=np.uint16).view(np.uint8), values_of("normal", 1 << 16), bfloat, add


def payload_of(code: str, count: int, block: int) -> Any:
    return np.zeros(4 * -(-count // block) + (-(-count // 2) if code == "int4" else count), np.uint8)


def make_quantise():
    for (code, top, by_norm, at_random, block), (before, after) in itertools.product(QUANTISED, residuals(COUNT)):
        how = block, code, top, by_norm, at_random, 12345
        yield hard(COUNT, block, 0), before, after, payload_of(code, COUNT, block), *how
    for code, block in itertools.product(("e4m3", "e5m2"), (256, 1024, 40)):
        x = between_codes(code, block)
        for before in (None, np.zeros_like(x)):
            how = block, code, float(x[0]), False, False, 0
            yield x, before, before, payload_of(code, len(x), block), *how


def make_restore():
    codes: tuple[Code, ...] = ("int8", "int4", "e4m3", "e5m2")
    for code, block, add in itertools.product(codes, (256, 520, 1024, 4096), (False, True)):
        payload = payload_of(code, COUNT, block)
        HOST.quantise(hard(COUNT, block, 0), None, None, payload, block, code, 7.0, False, False, 0)
        yield payload, values_of("normal", COUNT), block, code, add
        every = payload.copy()
        every[4 * -(-COUNT // block) :] = np.arange(len(payload) - 4 * -(-COUNT // block)) % 256
        yield every, values_of("normal", COUNT), block, code, add


def make_signs():
    for block, (before, after) in itertools.product(SIGNED, residuals(COUNT)):
        yield hard(COUNT, block, 0), before, after, payload_of("int8", COUNT, block), block


def make_unsign():
    for block, add in itertools.product(SIGNED, (False, True)):
        payload = payload_of("int8", COUNT, block)
        HOST.signs(hard(COUNT, block, 0), None, None, payload, block)
        yield payload, values_of("normal", COUNT), block, add


KINDS = ("normal", "ties", "equal", "zeros", "denormal", "huge", "near", "rising", "mostly zero", "far apart")


def make_largest():
    for (number, kind), (before, after) in itertools.product(enumerate(KINDS), residuals(150_000)):
        value = list(VALUES)[number % 3]
        payload = np.zeros(host_sparse.max_bytes(150_000, 1500, VALUES[value]), np.uint8)
        yield values_of(kind, 150_000), before, after, 1500, value, payload
    for factor, (before, after) in itertools.product((100.0, 0.0), residuals(len(misleading(1.0)))):
        x = misleading(factor)
        yield x, before, after, 40_000, "float32", np.zeros(host_sparse.max_bytes(len(x), 40_000, 0), np.uint8)


def make_random():
    for seed, (before, after) in itertools.product((0, -7), residuals(COUNT)):
        yield (
            values_of("normal", COUNT),
            before,
            after,
            700,
            seed,
            1.5,
            np.zeros(host_sparse.max_bytes(COUNT, 700, 0), np.uint8),
        )


def make_read_sparse():
    for value, add in itertools.product(VALUES, (False, True)):
        payload = np.zeros(host_sparse.max_bytes(COUNT, 500, VALUES[value]), np.uint8)
        used = HOST.largest(values_of("normal", COUNT), None, None, 500, value, payload)
        for data in (payload[:used].copy(), payload[: used - 3].copy()):
            yield data, value, np.zeros(COUNT, np.float32), add
        yield payload[:used].copy(), value, np.zeros(100, np.float32), add
        yield payload[:used].copy(), next(other for other in VALUES if other != value), np.zeros(COUNT, np.float32), add


def make_draw():
    for count, k in ((1, 1), (10, 9), (3000, 700), (2**32, 2000)):
        yield count, k - 5, np.zeros(k, np.uint32)


def places(k: int) -> Any:
    return np.random.default_rng(k).permutation(COUNT)[:k].astype(np.uint32)


def make_take():
    for before, after in residuals(COUNT):
        yield values_of("normal", COUNT), before, after, np.sort(places(1000)), 5.0, np.zeros(1000, np.float32)


def make_place():
    yield values_of("normal", 1000), places(1000), values_of("normal", COUNT, 1)


def make_accumulate():
    for (number, kind), nesterov in itertools.product(enumerate(("normal", "ties", "zeros")), (False, True)):
        value = list(VALUES)[number]
        arrays = [values_of(kind, 4001), *(values_of("normal", 4001, seed) for seed in range(4))]
        yield *arrays, 0.3, 0.9, nesterov, 40, value, np.zeros(host_sparse.max_bytes(4001, 40, VALUES[value]), np.uint8)


def make_orthonormalise():
    for rank in (1, 4, 9, 33):
        vectors = np.random.default_rng(rank).integers(-500, 501, (rank, 3000)).astype(np.float32)
        vectors[:, :rank] += 20_000 * np.eye(rank, dtype=np.float32)  # far from dependent, so errors do not grow
        yield vectors.reshape(-1), rank, 1e-6
    yield np.array([3, 4, 0, 6, 8, 0, 0, 0, 0, 1, 0, 0], np.float32), 4, 1e-6
    yield np.full(30, np.inf, np.float32), 3, 1e-6


def make_copy_blocks():
    for dtype, run in itertools.product(DTYPES, (1, 31, 32, 33, 500)):
        for shape in ((7, 5), (1, 30)):
            blocks = between_orders(*shape, run)
            x = values(dtype, shape[0] * shape[1] * run, 1)
            yield x, np.zeros_like(x), blocks


def rows_of(dtype: str, width: int) -> tuple[Any, Any, Any]:
    """Return 30 local rows and 20 remote ones, and factors of the local ones."""
    return values(dtype, 30 * width, 1), values(dtype, 20 * width, 2), values("float32", 30, 3)


def places_of_rows(count: int) -> Any:
    return np.random.default_rng(count).integers(-30, 20, count).astype(np.int32)


def make_take_rows():
    for dtype, width in itertools.product(FLOATS, (1, 65, 512)):
        local, remote, factors = rows_of(dtype, width)
        for by in (None, factors):
            yield local, remote, by, places_of_rows(50), width, np.zeros(50 * width, NUMPY[dtype])


def make_sum_rows():
    starts = np.cumsum([0, *np.arange(40) % 5]).astype(np.int32)
    for dtype, width in itertools.product(FLOATS, (1, 65, 512)):
        local, remote, factors = rows_of(dtype, width)
        for by in (None, factors):
            target = np.zeros((len(starts) - 1) * width, NUMPY[dtype])
            yield local, remote, by, starts, places_of_rows(int(starts[-1])), width, target


def make_multiply_rows():
    for dtype, width in itertools.product(FLOATS, (1, 65, 512)):
        for in_place in (False, True):
            one, other = values(dtype, 30 * width, 1), values(dtype, 30 * width, 2)
            scaled = one if in_place else np.zeros_like(one)
            yield one, other, values("float32", 30, 3), width, scaled, np.zeros(30, np.float32)


def integers(count: int, seed: int) -> Any:
    """Return small whole numbers, whose products are exact in any order."""
    return np.random.default_rng(seed).integers(-7, 8, count).astype(np.float32)


SHAPES = [(rows, cols, rank) for rows, cols in ((2, 5000), (300, 3), (70, 90)) for rank in (1, 4, 9)]


def make_project():
    for rows, cols, rank in SHAPES:
        for before in (integers(rows * cols, 1), np.empty(0, np.float32)):
            arrays = integers(rank * cols, 2), np.zeros(rank * rows, np.float32)
            yield integers(rows * cols, 0), before, rows, cols, *arrays, rank


def make_project_back():
    for rows, cols, rank in SHAPES:
        yield integers(rows * cols, 0), rows, cols, integers(rank * rows, 1), np.zeros(rank * cols, np.float32), rank


def make_expand():
    for rows, cols, rank in SHAPES:
        for after in (np.zeros(rows * cols, np.float32), np.empty(0, np.float32)):
            factors = (values_of("normal", rank * length, seed) for seed, length in enumerate((rows, cols, cols)))
            yield values_of("normal", rows * cols), after, rows, cols, *factors, rank


MAKERS = {name.removeprefix("make_"): make for name, make in list(globals().items()) if name.startswith("make_")}
