"""all_to_all_v within a node: one compiled call, in which ranks exchange their counts and then their rows.

At its first barrier each rank publishes a *note* with the offsets of its parts, in rows, its expected counts, and the
location of its arrays. Each rank then knows all transfers that concern it, compares them with its expectations, and
copies its data; the notes need no other barrier. The mode of a sender's parts is in its note:

NOW   through its slot: little data, or no other path. The first *window* is published with the note.
PULL  its array is in symmetric memory: each receiver copies its part directly out of it.
HELD  no data is published with the note. If all results are in symmetric memory, the sender copies directly into
      them (PUSH); else receivers read its memory by a system call, if permitted (READ); else data goes through the
      slot, one barrier later (LATE).

Data through a slot is a stream: the parts in the order of their receivers, from the rank after the sender on, window by
window, with one barrier per window. While receivers drain one slot, its owner fills the other. After PULL, PUSH and
READ all ranks synchronize once more.

A rank whose counts do not match a peer's takes part in all barriers, and moves no mismatched data. The other ranks get
their data, and the group stays in step.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba.core import types

from commlib.kernels.fields.arrays import DATA
from commlib.kernels.fields.node import (
    BROKEN,
    DONE,
    EPOCH,
    FAILED,
    RANK,
    SIZE,
    SLOT_BYTES,
    SLOTS,
    STATE,
    WAITING,
)
from commlib.kernels.fields.uneven_exchange import (
    AFTER,
    AT,
    CALL,
    EXPECTED_ROWS,
    FIELDS,
    FROM,
    HEAD,
    HELD,
    KNOWN,
    LATE,
    LENGTH,
    MODE,
    MODES,
    N_ADDRESS,
    N_MODE,
    N_OFFSET,
    N_OUT_OFFSET,
    N_OUT_SEGMENT,
    N_SEGMENT,
    N_TOTAL,
    NOW,
    OUT_ROWS,
    PARTS,
    PEER_FIELDS,
    PEERS,
    PLACES,
    PROCESSES,
    PULL,
    PUSH,
    RANGES,
    READ,
    READS,
    RECEIVED_ROWS,
    REFUSED,
    ROUND,
    ROUNDS,
    ROW,
    ROWS,
    SIZED,
    SOURCE,
    SPLITS,
    STREAM,
    TARGET,
    TARGET_BYTES,
    TO,
    TOTAL,
    UNEQUAL,
    UNFIT,
    UNREADABLE,
    VERDICT,
)
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.call_routes import _find
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.node import (
    _arrive,
    _await_peers,
    _call,
    _control,
    _count,
    _table,
)
from commlib.kernels.host.stream import stream_copy

_NO_RESULT = -1  # an empty result needs no segment

# Up to the first size a slot is faster than two barriers; up to the second it is also faster than a system call.
SMALL_BYTES, READ_FROM = 4096, 12 << 10

# Maximum length of a window: drained data is then still in the cache of the core that has written it.
WINDOW_BYTES = 128 << 10

# From this size on a part is copied past the caches, which would lose its beginning anyway.
STREAMED_PART = 8 << 20


process_vm_readv = types.ExternalFunction(
    "process_vm_readv", types.intp(types.int32, types.intp, types.uintp, types.intp, types.uintp, types.uintp)
)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _note(control: Any, rank: int, epoch: int) -> Any:
    size = control[SIZE]
    room = (8 * (HEAD + 2 * (size + 1)) + 63) // 64 * 64
    slots = _table(control[SLOTS], size)
    return _table(slots[rank] + 2 * control[SLOT_BYTES] + (epoch & 1) * room, HEAD + 2 * (size + 1))


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _window(control: Any) -> int:
    return min(WINDOW_BYTES, control[SLOT_BYTES])


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _peer(uneven: Any, rank: int) -> Any:
    return _table(uneven[PEERS] + 8 * PEER_FIELDS * rank, PEER_FIELDS)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _base(places: int, size: int, segment: int, rank: int) -> int:
    """Return the address of a rank's part of a segment in this process."""
    head, width = _table(places, 2), 3 + size
    for number in range(head[1]):
        row = _table(head[0] + 8 * width * number, width)
        if row[2] == segment:
            return row[3 + rank]
    return 0


@kernel(nogil=True)
def _is_right(uneven: Any, control: Any) -> bool:
    """Return whether this rank's counts match its arrays, which must not overlap. Python would take longer."""
    rank, size, row = control[RANK], control[SIZE], uneven[ROW]
    parts = _table(uneven[PARTS], SPLITS + 2 * size)
    send_total = receive_total = 0
    for peer in range(size):
        if min(parts[SPLITS + peer], parts[SPLITS + size + peer]) < 0:
            return False
        send_total += parts[SPLITS + peer]
        receive_total += parts[SPLITS + size + peer]
    if send_total != parts[ROWS]:
        return False
    if uneven[KNOWN] != 0:
        if parts[SPLITS + rank] != parts[SPLITS + size + rank]:
            return False
        if uneven[TARGET] != 0 and receive_total != parts[OUT_ROWS]:
            return False
    source, target = uneven[SOURCE], uneven[TARGET]
    return target == 0 or source + send_total * row <= target or target + parts[OUT_ROWS] * row <= source


@kernel(nogil=True)
def _write_note(uneven: Any, control: Any) -> None:
    """Write what this rank sends and receives, and the locations of its arrays."""
    rank, size, row = control[RANK], control[SIZE], uneven[ROW]
    note = _note(control, rank, control[EPOCH] + 1)
    parts = _table(uneven[PARTS], SPLITS + 2 * size)
    send_total = receive_total = 0
    for peer in range(size):
        note[HEAD + peer] = send_total
        note[HEAD + size + 1 + peer] = receive_total
        send_total += parts[SPLITS + peer]
        receive_total += parts[SPLITS + size + peer]
    note[HEAD + size] = send_total
    note[HEAD + 2 * size + 1] = receive_total
    total = (send_total - parts[SPLITS + rank]) * row
    note[N_OUT_SEGMENT] = 0
    mode = NOW
    if uneven[KNOWN] != 0 and uneven[TARGET] != 0:
        if receive_total * row == 0:
            note[N_OUT_SEGMENT] = _NO_RESULT
        else:
            place = _find(uneven[PLACES], size, uneven[TARGET], receive_total * row)
            if place != 0:
                segment = _table(place, 3)
                note[N_OUT_SEGMENT] = segment[2]
                note[N_OUT_OFFSET] = uneven[TARGET] - segment[0]
    if total > SMALL_BYTES:
        place = _find(uneven[PLACES], size, uneven[SOURCE], send_total * row)
        if place != 0:
            segment = _table(place, 3)
            note[N_SEGMENT] = segment[2]
            note[N_OFFSET] = uneven[SOURCE] - segment[0]
            mode = PULL
        elif note[N_OUT_SEGMENT] > 0 or (uneven[READS] != 0 and total >= READ_FROM):
            mode = HELD
    note[N_MODE] = mode
    note[N_TOTAL] = total
    note[N_ADDRESS] = uneven[SOURCE]
    uneven[MODE] = mode
    uneven[TOTAL] = total


@kernel(nogil=True)
def _read_notes(uneven: Any, control: Any) -> None:
    """Compute all transfers from the notes, whether they match the expectations, and the number of barriers."""
    rank, size, row = control[RANK], control[SIZE], uneven[ROW]
    parts = _table(uneven[PARTS], SPLITS + 2 * size)
    verdict, rounds, after = DONE, 1, 0
    in_reach = True
    for peer in range(size):
        in_reach &= _note(control, peer, control[EPOCH])[N_OUT_SEGMENT] != 0
    rows = 0
    for peer in range(size):
        note, entry = _note(control, peer, control[EPOCH]), _peer(uneven, peer)
        begin = note[HEAD + rank]
        received = note[HEAD + rank + 1] - begin
        mode, total = note[N_MODE], note[N_TOTAL]
        if mode == HELD:
            mode = PUSH if in_reach else (READ if uneven[READS] != 0 else LATE)
        if peer == rank:
            uneven[MODE] = mode
        expects = parts[SPLITS + peer]
        if uneven[KNOWN] != 0:
            expects = note[HEAD + size + 1 + rank + 1] - note[HEAD + size + 1 + rank]
            if received != parts[SPLITS + size + peer] or expects != parts[SPLITS + peer]:
                verdict = UNEQUAL
        else:
            parts[SPLITS + size + peer] = received
        entry[MODES], entry[LENGTH], entry[AT], entry[RECEIVED_ROWS], entry[EXPECTED_ROWS] = (
            mode,
            received * row,
            rows * row,
            received,
            expects,
        )
        rows += received
        # The stream does not contain the sender's own part.
        behind = note[HEAD + peer + 1]
        entry[STREAM] = (begin - behind if rank > peer else note[HEAD + size] - behind + begin) * row
        if mode == PULL:
            entry[FROM] = _base(uneven[PLACES], size, note[N_SEGMENT], peer) + note[N_OFFSET] + begin * row
        elif mode == READ:
            entry[FROM] = note[N_ADDRESS] + begin * row
        entry[TARGET_BYTES] = 0
        if in_reach and peer != rank and note[N_OUT_SEGMENT] > 0 and expects == parts[SPLITS + peer]:
            entry[TARGET_BYTES] = expects * row
            entry[TO] = _base(uneven[PLACES], size, note[N_OUT_SEGMENT], peer) + note[N_OUT_OFFSET]
            entry[TO] += note[HEAD + size + 1 + rank] * row
        if mode in (NOW, LATE):
            window = _window(control)
            rounds = max(rounds, (total + window - 1) // window + (1 if mode == LATE else 0))
        elif total > 0:
            after = 1
    if uneven[TARGET] == 0:
        parts[OUT_ROWS] = rows
    elif verdict == DONE and rows != parts[OUT_ROWS]:
        verdict = UNFIT
    uneven[VERDICT], uneven[ROUNDS], uneven[AFTER], uneven[ROUND] = verdict, rounds, after, 0


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _read(uneven: Any, process: int, target: int, source: int, length: int) -> bool:
    """Copy from the memory of another process; return whether that was possible."""
    ranges = _table(uneven[RANGES], 4)
    done = 0
    while done < length:
        ranges[0], ranges[2] = target + done, source + done
        ranges[1] = ranges[3] = length - done
        count = process_vm_readv(process, uneven[RANGES], 1, uneven[RANGES] + 16, 1, 0)
        if count <= 0:
            return False
        done += count
    return True


@kernel(nogil=True)
def _fill(uneven: Any, control: Any) -> None:
    """Put the next window of this rank's stream into its slot."""
    number = uneven[ROUND]
    if uneven[MODE] == LATE:
        number -= 1
    elif uneven[MODE] != NOW:
        return
    rank, row, window = control[RANK], uneven[ROW], _window(control)
    parts = _table(uneven[PARTS], SPLITS + 2 * control[SIZE])
    begin, end = number * window, min((number + 1) * window, uneven[TOTAL])
    if number < 0 or begin >= end:
        return
    slot = _table(control[SLOTS], control[SIZE])[rank] + ((control[EPOCH] + 1) & 1) * control[SLOT_BYTES]
    before = 0
    for peer in range(rank):
        before += parts[SPLITS + peer]
    before *= row  # bytes before this rank's own part: the end of the stream
    behind = before + parts[SPLITS + rank] * row
    turn = uneven[TOTAL] - before
    if begin < turn:
        length = min(end, turn) - begin
        ins.memcpy(slot, uneven[SOURCE] + behind + begin, length)
        slot += length
        begin += length
    if begin < end:
        ins.memcpy(slot, uneven[SOURCE] + begin - turn, end - begin)


@kernel(nogil=True)
def _drain(uneven: Any, control: Any) -> None:
    """Copy the data for this rank out of the other ranks' slots."""
    rank, size, window = control[RANK], control[SIZE], _window(control)
    slots = _table(control[SLOTS], size)
    for step in range(1, size):
        sender = (rank + step) % size
        peer = _peer(uneven, sender)
        number = uneven[ROUND] - (1 if peer[MODES] == LATE else 0)
        if peer[MODES] not in (NOW, LATE) or number < 0:
            continue
        first = number * window
        begin, end = max(first, peer[STREAM]), min(first + window, peer[STREAM] + peer[LENGTH])
        if begin < end:
            slot = slots[sender] + (control[EPOCH] & 1) * control[SLOT_BYTES]
            ins.memcpy(uneven[TARGET] + peer[AT] + begin - peer[STREAM], slot + begin - first, end - begin)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def _copy(target: int, source: int, length: int) -> None:
    if length >= STREAMED_PART:
        stream_copy(target, source, length)
    else:
        ins.memcpy(target, source, length)


@kernel(nogil=True)
def _move(uneven: Any, control: Any) -> None:
    """Copy all parts that need no slot."""
    rank, size = control[RANK], control[SIZE]
    processes = _table(uneven[PROCESSES], size)
    own = 0
    offset = 0
    for step in range(size):
        number = (rank + step) % size
        peer = _peer(uneven, number)
        if uneven[MODE] == PUSH and peer[TARGET_BYTES] > 0:
            parts = _table(uneven[PARTS], SPLITS + 2 * size)
            offset = 0
            for other in range(number):
                offset += parts[SPLITS + other]
            _copy(peer[TO], uneven[SOURCE] + offset * uneven[ROW], peer[TARGET_BYTES])
        if uneven[VERDICT] != DONE or peer[LENGTH] == 0:
            continue
        target = uneven[TARGET] + peer[AT]
        if number == rank:
            parts = _table(uneven[PARTS], SPLITS + 2 * size)
            own = 0
            for other in range(rank):
                own += parts[SPLITS + other]
            _copy(target, uneven[SOURCE] + own * uneven[ROW], peer[LENGTH])
        elif peer[MODES] == PULL:
            _copy(target, peer[FROM], peer[LENGTH])
        elif peer[MODES] == READ and not _read(uneven, processes[number], target, peer[FROM], peer[LENGTH]):
            uneven[VERDICT] = UNREADABLE


@kernel(nogil=True)
def run(address: int) -> int:
    """Run a call, or continue it after WAITING or SIZED."""
    uneven = _table(address, FIELDS)
    call = _call(uneven[CALL])
    control = _control(call)
    if control[FAILED] != 0:
        return BROKEN
    if call[STATE] == 0:
        if uneven[KNOWN] == 0:
            parts = _table(uneven[PARTS], SPLITS + 2 * control[SIZE])
            for peer in range(control[SIZE]):
                parts[SPLITS + control[SIZE] + peer] = 0  # counts that a plan learned earlier
        if not _is_right(uneven, control):
            return REFUSED
        _count(call, control)
        uneven[ROUND] = 0
        _write_note(uneven, control)
        _fill(uneven, control)
        _arrive(call, control)
        call[STATE] = 1
    if call[STATE] == 1:
        status = _await_peers(call, control)
        if status == WAITING:
            return WAITING
        if status != DONE:
            call[STATE] = 0
            return status
        _read_notes(uneven, control)
        call[STATE] = 2
        if uneven[TARGET] == 0 and uneven[VERDICT] == DONE:
            return SIZED
    if call[STATE] == 2:
        _move(uneven, control)
        if uneven[VERDICT] == DONE:
            _drain(uneven, control)
        uneven[ROUND] = 1
        call[STATE] = 3
    while True:
        if call[STATE] == 3:
            if uneven[ROUND] >= uneven[ROUNDS] and uneven[AFTER] == 0:
                break
            if uneven[ROUND] < uneven[ROUNDS]:
                _fill(uneven, control)
            _arrive(call, control)
            call[STATE] = 4
        if _await_peers(call, control) == WAITING:
            return WAITING
        call[STATE] = 3
        if uneven[ROUND] >= uneven[ROUNDS]:
            break
        if uneven[VERDICT] == DONE:
            _drain(uneven, control)
        uneven[ROUND] += 1
    call[STATE] = 0
    return uneven[VERDICT]


@kernel(nogil=True)
def run_on_arrays(address: int, source: int, parts: int) -> int:
    """Run a call on numpy arrays, given by their `id`: in Python, the address lookups cost as much."""
    uneven = _table(address, FIELDS)
    uneven[SOURCE], uneven[PARTS] = ins.load_acquire(source + DATA), ins.load_acquire(parts + DATA)
    out = _table(uneven[PARTS], 1)[0]
    uneven[TARGET] = 0 if out == 0 else ins.load_acquire(out + DATA)
    return run(address)
