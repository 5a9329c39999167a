"""Codecs whose payloads have a fixed length: halves, quantised blocks, signs. See `kernels.host`, convert to signs."""

from __future__ import annotations

from typing import Any

from commlib.kernels.cuda.arguments import at, f32, u32, u64
from commlib.kernels.cuda.launcher import Launcher
from commlib.kernels.protocol import Code

# As in the files beside this: elements, or bytes of codes, that a worker does at a time.
_PIECE = 1024

# A worker's lanes can hold blocks of such lengths, and several workers share a longer one.
_SHORTEST_HELD, _LONGEST_HELD = 256, 2048


def narrow(launcher: Launcher, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
    arrays = at(x), at(before), at(after), at(payload)
    launcher.launch("narrow.cu", "narrow", {"BFLOAT": int(bfloat)}, _up(len(x), 128), *arrays, u64(len(x)))


def widen(launcher: Launcher, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
    arguments = at(payload), at(out), u64(len(out)), u32(add)
    launcher.launch("narrow.cu", "widen", {"BFLOAT": int(bfloat)}, _up(len(out), 128), *arguments)


def quantise(
    launcher: Launcher,
    x: Any,
    before: Any,
    after: Any,
    payload: Any,
    block: int,
    code: Code,
    top: float,
    by_norm: bool,
    at_random: bool,
    seed: int,
) -> None:
    at_random = at_random and code in ("int8", "int4")  # floats are rounded to nearest in any case
    how = {"CODE": code.upper(), "BY_NORM": int(by_norm), "AT_RANDOM": int(at_random), "HELD": _held(block)}
    size = u64(len(x)), u32(block)
    arguments = at(x), at(before), at(after), at(payload), *size, f32(top), u64(seed % 2**64)
    if block <= _LONGEST_HELD:
        launcher.launch("quantise.cu", "quantise", how, _up(len(x), block), *arguments)
    else:
        _measure(launcher, "quantise.cu", how, x, before, payload, block, top, by_norm)
        codes = (block + 1) // 2 if code == "int4" else block
        workers = _up(len(x), block) * _up(codes, _PIECE)
        launcher.launch("quantise.cu", "encode_pieces", how, workers, *arguments)


def restore(launcher: Launcher, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
    codes = (block + 1) // 2 if code == "int4" else block
    workers = _up(len(out), block) * _up(codes, _PIECE)
    arguments = at(payload), at(out), u64(len(out)), u32(block), u32(add)
    how = {"CODE": code.upper(), "HELD": _held(block)}
    launcher.launch("restore.cu", "restore", how, workers, *arguments)


def signs(launcher: Launcher, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
    how = {"HELD": _held(block)}
    arguments = at(x), at(before), at(after), at(payload), u64(len(x)), u32(block)
    if block <= _LONGEST_HELD:
        launcher.launch("signs.cu", "signs", how, _up(len(x), block), *arguments)
    else:
        _measure(launcher, "signs.cu", how, x, before, payload, block, 0.0, True)
        workers = _up(len(x), block) * _up(block, 8 * _PIECE)
        launcher.launch("signs.cu", "encode_pieces", how, workers, *arguments)


def unsign(launcher: Launcher, payload: Any, out: Any, block: int, add: bool) -> None:
    workers = _up(len(out), block) * _up(block, 8 * _PIECE)
    arguments = at(payload), at(out), u64(len(out)), u32(block), u32(add)
    launcher.launch("unsign.cu", "unsign", {"HELD": _held(block)}, workers, *arguments)


def _measure(
    launcher: Launcher,
    source: str,
    how: dict[str, Any],
    x: Any,
    before: Any,
    payload: Any,
    block: int,
    top: float,
    sums: bool,
) -> None:
    """Write the measures of long blocks to the payload, by several workers for each block; see measure.cuh."""
    blocks, pieces = _up(len(x), block), _up(block, _PIECE)
    values, size = (at(x), at(before)), (u64(len(x)), u32(block))
    found = launcher.scratch(4 * blocks * pieces)
    launcher.launch(source, "greatest", how, blocks * pieces, *values, *size, at(found))
    # So often halved, a block is a row of 513 to 1024 sums: enough columns for many lanes.
    levels = (_up(block, _PIECE) - 1).bit_length()
    row = _up(block, 1 << levels)
    added = launcher.scratch(4 * blocks * row) if sums else None
    if sums:
        halving = f32(top), at(found), u32(levels), at(added)
        launcher.launch(source, "columns", how, blocks * _up(row, 32), *values, *size, *halving)
    launcher.launch(source, "measure", how, blocks, at(payload), *size, f32(top), at(found), u32(levels), at(added))


def _held(block: int) -> int:
    """Return the block's length if lanes hold it in registers: a power of two; else 0."""
    return block if _SHORTEST_HELD <= block <= _LONGEST_HELD and block & (block - 1) == 0 else 0


def _up(count: int, share: int) -> int:
    return -(-count // share)
