"""Rounds: run a program of small messages in one compiled call without the GIL: start, wait and combine per round.

The arguments are in one int64 array, whose fields are in `fields.rounds`, and in one row per round. A call that has
waited long returns WAITING; the next call continues from that point.
"""

from __future__ import annotations

from typing import Any

import numba as nb

from commlib.kernels.fields.arrays import (
    DATA,
)
from commlib.kernels.fields.rounds import (
    ADDRESSES,
    BUFFER,
    CODE,
    COMBINATIONS,
    DIFFERENT,
    DONE,
    FAILED,
    FLAG,
    HANDLES,
    MARKS,
    MESSAGES,
    NBYTES,
    NEXT,
    PROGRAM_FIELDS,
    ROUNDS,
    ROW_FIELDS,
    ROWS,
    SPINS,
    START,
    STARTED,
    STATUSES,
    TEST,
    WAITING,
    YIELDS,
)
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host import requests
from commlib.kernels.host.arrays import (
    int32,
    table,
)
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.node import all_equal
from commlib.kernels.host.reduce import reduce_as_written
from commlib.kernels.host.waiting import LONG_WAIT, count_late_polls, now, pause


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _await(program: Any, row: Any) -> Any:
    """Wait until all messages of a round are complete: DONE, WAITING or FAILED."""
    polls = 0
    while True:
        began = now()
        code = requests.test(program[TEST], row[MESSAGES], row[HANDLES], program[FLAG], program[STATUSES])
        if code != 0:
            program[CODE] = code
            return FAILED
        if int32(program[FLAG]) != 0:
            return DONE
        polls = pause(polls + count_late_polls(began), program[SPINS], program[YIELDS], 0, 0)
        if polls == LONG_WAIT:
            return WAITING


@kernel(nogil=True)
def play(address: int, source: int, target: int) -> int:
    """Run all rounds, and compare the marks.

    source, target: numpy arrays, given by their `id`. The source is copied to the buffer before the rounds, and the
    buffer to the target after them; 0 copies nothing.
    """
    program = table(address, PROGRAM_FIELDS)
    if source != 0 and program[NEXT] == 0 and program[STARTED] == 0:
        ins.memcpy(program[BUFFER], ins.load_acquire(source + DATA), program[NBYTES])
    while program[NEXT] < program[ROUNDS]:
        row = table(program[ROWS] + 8 * ROW_FIELDS * program[NEXT], ROW_FIELDS)
        if program[STARTED] == 0:
            code = requests.start(program[START], row[MESSAGES], row[HANDLES])
            if code != 0:
                program[CODE] = code
                return FAILED
            program[STARTED] = 1
        status = _await(program, row)
        if status != DONE:
            return status
        combinations = table(row[ADDRESSES], row[COMBINATIONS])
        for address_of_one in combinations:
            reduce_as_written(address_of_one)
        program[STARTED] = 0
        program[NEXT] += 1
    program[NEXT] = 0
    if program[MARKS] != 0 and all_equal(program[MARKS]) == 0:
        return DIFFERENT
    if target != 0:
        ins.memcpy(ins.load_acquire(target + DATA), program[BUFFER], program[NBYTES])
    return DONE
