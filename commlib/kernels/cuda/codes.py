"""Codecs with payloads of fixed length: halves, quantized blocks, signs. See `kernels.host`, convert to signs."""

from __future__ import annotations

from typing import Any

from commlib.kernels.cuda.arguments import f32, pointer_to, u32, u64
from commlib.kernels.cuda.launcher import LaunchedKernels
from commlib.kernels.protocol import Code

# As in the .cu files: elements, or bytes of codes, that a worker processes at a time.
_PIECE = 1024

# Shortest and longest blocks that a worker's lanes hold. Several workers share a longer one.
_SHORTEST_HELD, _LONGEST_HELD = 256, 2048


class CodecKernels(LaunchedKernels):
    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        arrays = pointer_to(x), pointer_to(before), pointer_to(after), pointer_to(payload)
        self._launch("narrow.cu", "narrow", {"BFLOAT": int(bfloat)}, _divide_up(len(x), 128), *arrays, u64(len(x)))

    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        arguments = pointer_to(payload), pointer_to(out), u64(len(out)), u32(add)
        self._launch("narrow.cu", "widen", {"BFLOAT": int(bfloat)}, _divide_up(len(out), 128), *arguments)

    def quantise(
        self,
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
        at_random = at_random and code in ("int8", "int4")  # floats are always rounded to nearest
        how = {"CODE": code.upper(), "BY_NORM": int(by_norm), "AT_RANDOM": int(at_random), "HELD": _held_length(block)}
        size = u64(len(x)), u32(block)
        arguments = (
            pointer_to(x),
            pointer_to(before),
            pointer_to(after),
            pointer_to(payload),
            *size,
            f32(top),
            u64(seed % 2**64),
        )
        if block <= _LONGEST_HELD:
            self._launch("quantise.cu", "quantise", how, _divide_up(len(x), block), *arguments)
        else:
            self._measure("quantise.cu", how, x, before, payload, block, top, by_norm)
            codes = (block + 1) // 2 if code == "int4" else block
            workers = _divide_up(len(x), block) * _divide_up(codes, _PIECE)
            self._launch("quantise.cu", "encode_pieces", how, workers, *arguments)

    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        codes = (block + 1) // 2 if code == "int4" else block
        workers = _divide_up(len(out), block) * _divide_up(codes, _PIECE)
        arguments = pointer_to(payload), pointer_to(out), u64(len(out)), u32(block), u32(add)
        how = {"CODE": code.upper(), "HELD": _held_length(block)}
        self._launch("restore.cu", "restore", how, workers, *arguments)

    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        how = {"HELD": _held_length(block)}
        arguments = pointer_to(x), pointer_to(before), pointer_to(after), pointer_to(payload), u64(len(x)), u32(block)
        if block <= _LONGEST_HELD:
            self._launch("signs.cu", "signs", how, _divide_up(len(x), block), *arguments)
        else:
            self._measure("signs.cu", how, x, before, payload, block, 0.0, True)
            workers = _divide_up(len(x), block) * _divide_up(block, 8 * _PIECE)
            self._launch("signs.cu", "encode_pieces", how, workers, *arguments)

    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        workers = _divide_up(len(out), block) * _divide_up(block, 8 * _PIECE)
        arguments = pointer_to(payload), pointer_to(out), u64(len(out)), u32(block), u32(add)
        self._launch("unsign.cu", "unsign", {"HELD": _held_length(block)}, workers, *arguments)

    def _measure(
        self,
        source: str,
        how: dict[str, Any],
        x: Any,
        before: Any,
        payload: Any,
        block: int,
        top: float,
        sums: bool,
    ) -> None:
        """Write the measures of long blocks to the payload, with several workers per block; see measure.cuh."""
        blocks, pieces = _divide_up(len(x), block), _divide_up(block, _PIECE)
        values, size = (pointer_to(x), pointer_to(before)), (u64(len(x)), u32(block))
        maxima = self._scratch(4 * blocks * pieces)
        self._launch(source, "greatest", how, blocks * pieces, *values, *size, pointer_to(maxima))
        # After this many halvings, a block is a row of 513 to 1024 sums: enough columns for many lanes.
        levels = (_divide_up(block, _PIECE) - 1).bit_length()
        row = _divide_up(block, 1 << levels)
        added = self._scratch(4 * blocks * row) if sums else None
        if sums:
            halving = f32(top), pointer_to(maxima), u32(levels), pointer_to(added)
            self._launch(source, "columns", how, blocks * _divide_up(row, 32), *values, *size, *halving)
        self._launch(
            source,
            "measure",
            how,
            blocks,
            pointer_to(payload),
            *size,
            f32(top),
            pointer_to(maxima),
            u32(levels),
            pointer_to(added),
        )


def _held_length(block: int) -> int:
    """Return the block's length if lanes hold it in registers, which needs a power of two; else 0."""
    return block if _SHORTEST_HELD <= block <= _LONGEST_HELD and block & (block - 1) == 0 else 0


def _divide_up(count: int, share: int) -> int:
    return -(-count // share)
