"""Binaries: compile a kernel's text by NVRTC, and keep what comes of it on disk, as CuPy keeps its own.

CuPy's way to compile a text (`RawModule(code=...)`) adds -ftz=true, which flushes denormal numbers: results would not
be the host's. So its binding of NVRTC is used, and its loader.
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
    """Return the path of a compiled text, for a GPU of a compute capability such as 90.

    Where NVRTC is older than the GPU it is PTX, which the driver compiles. Raises TransportError with what NVRTC says.
    """
    nvrtc = cupy.cuda.nvrtc
    known = sorted(int(arch) for arch in nvrtc.getSupportedArchs())
    exact = capability in known
    newest = max((arch for arch in known if arch <= capability), default=capability)
    options = (*options, f"-arch=sm_{capability}" if exact else f"-arch=compute_{newest}")
    told = "\0".join([text, *options, str(nvrtc.getVersion())])
    name = f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.{'cubin' if exact else 'ptx'}"
    folder = folders.user_cache() / "cuda"
    with suppress(OSError), folders.private(folder) as here:
        folders.read_private(name, here)
        return str(folder / name)
    made = _compiled(nvrtc, text, options, what, exact=exact)
    try:
        with folders.private(folder, create=True) as here:
            folders.write_private(name, here, made)
    except OSError:  # read-only, or not this user's alone: for this process, then
        folder = Path(tempfile.mkdtemp(prefix="commlib-cuda-"))
        (folder / name).write_bytes(made)
    return str(folder / name)


def _compiled(nvrtc: Any, text: str, options: Sequence[str], what: str, *, exact: bool) -> bytes:
    program = nvrtc.createProgram(text, what, (), ())
    try:
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            raise TransportError(
                f"NVRTC {nvrtc.getVersion()} does not compile {what} with {options}: {error}"
            ) from error
        made: bytes = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
        return made
    finally:
        nvrtc.destroyProgram(program)
