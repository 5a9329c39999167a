"""Sources: which source files are commlib's, the user's, or a library's."""

from __future__ import annotations

import site
import sysconfig
from functools import cache
from pathlib import Path

_HOME = Path(__file__).parents[2]
# Installed, all packages are in one folder; in a checkout the adapters are in `adapters`.
_OURS = (
    f"{_HOME}/commlib/",
    *(f"{home}/commlib_{framework}/" for home in (_HOME, _HOME / "adapters") for framework in ("torch", "tensorflow")),
)


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return tuple(f"{path}/" for path in dict.fromkeys([*folders, site.getusersitepackages()]))


_WRAPPERS = (
    "/__autograph_generated_file",
    "/tensorflow/python/autograph/",
    "/tensorflow/python/eager/execute.py",
    "/tensorflow/python/util/traceback_utils.py",
)


def is_ours(file: str) -> bool:
    """Return whether a source file belongs to commlib or an adapter."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user: neither to commlib nor to a library."""
    return not (is_ours(file) or is_wrapper(file) or file.startswith(("<frozen", *_libraries())))


def is_wrapper(file: str) -> bool:
    """Return whether a source file is TensorFlow's, between the user's code and what that calls in a function."""
    return any(part in file for part in _WRAPPERS)
