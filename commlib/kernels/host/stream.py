"""Streaming copies: bypass the caches for data that is read so late that the caches would have lost it.

An ordinary store first reads the line that it overwrites. A streaming store sends full lines to memory and evicts
nothing from the caches.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel

# One cache line. LLVM splits it into as many registers as the CPU needs.
_LINE_BYTES = 64


@intrinsic
def _stream_lines(typingctx: Any, target: Any, source: Any, lines: Any) -> Any:
    """Copy `lines` cache lines with streaming stores to `target`, an address that is a multiple of 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE_BYTES // 8)
        target, source = (builder.inttoptr(address, line.as_pointer()) for address in args[:2])
        yes = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, args[2]) as loop:
            value = builder.load(builder.gep(source, [loop.index]), align=1)
            store = builder.store(value, builder.gep(target, [loop.index]), align=_LINE_BYTES)
            store.set_metadata("nontemporal", yes)
        # Streaming stores may become visible late, and the flag that publishes them must not overtake them. (The locked
        # instruction of this fence on x86 flushes the write-combining buffers.)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@kernel(nogil=True)
def stream_copy(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between addresses that do not overlap."""
    head = min(nbytes, -target % _LINE_BYTES)
    lines = (nbytes - head) // _LINE_BYTES
    body = lines * _LINE_BYTES
    ins.memcpy(target, source, head)
    _stream_lines(target + head, source + head, lines)
    ins.memcpy(target + head + body, source + head + body, nbytes - head - body)
