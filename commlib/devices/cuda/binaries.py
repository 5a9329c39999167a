"""Binaries: compile kernel sources with NVRTC, and cache the binaries on disk, as CuPy does for its own kernels.

CuPy's compiler (`RawModule(code=...)`) adds -ftz=true, which flushes denormal numbers, so results would differ from the
host's. Therefore this module uses CuPy's NVRTC binding directly, and CuPy's loader.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from commlib import folders
from commlib.errors import TransportError


def binary(cupy: Any, text: str, options: Sequence[str], capability: int, what: str) -> str:
    """Compile a source for a GPU of a compute capability such as 90; return the path of the binary.

    If NVRTC is older than the GPU, the result is PTX, which the driver compiles. TransportError has NVRTC's log.
    """
    nvrtc = cupy.cuda.nvrtc
    known = sorted(int(arch) for arch in nvrtc.getSupportedArchs())
    exact = capability in known
    newest = max((arch for arch in known if arch <= capability), default=capability)
    options = (*options, f"-arch=sm_{capability}" if exact else f"-arch=compute_{newest}")
    fingerprint = "\0".join([text, *options, str(nvrtc.getVersion())])
    name = f"{hashlib.sha256(fingerprint.encode()).hexdigest()[:32]}.{'cubin' if exact else 'ptx'}"
    folder = folders.user_cache() / "cuda"
    with suppress(OSError), folders.open_private(folder) as here:
        folders.read_private(name, here)
        return str(folder / name)
    compiled = _compile(nvrtc, text, options, what, exact=exact)
    try:
        with folders.open_private(folder, create=True) as here:
            folders.write_private(name, here, compiled)
    except OSError:  # read-only, or accessible to other users: use a folder of this process
        folder = Path(tempfile.mkdtemp(prefix="commlib-cuda-"))
        (folder / name).write_bytes(compiled)
    return str(folder / name)


def _compile(nvrtc: Any, text: str, options: Sequence[str], what: str, *, exact: bool) -> bytes:
    program = nvrtc.createProgram(text, what, (), ())
    try:
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            raise TransportError(
                f"NVRTC {nvrtc.getVersion()} does not compile {what} with {options}: {error}"
            ) from error
        compiled: bytes = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
        return compiled
    finally:
        nvrtc.destroyProgram(program)
