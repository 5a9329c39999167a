"""Kernels of the host: compiled by numba.

Where colorama is installed, numba writes escape codes to standard output at the end of a program that has compiled a
kernel. It asks this variable when it is imported, so it is set for that long.
"""

import os

_VARIABLE = "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"
_given = os.environ.get(_VARIABLE)
os.environ[_VARIABLE] = "1"
try:
    import numba as numba
finally:
    if _given is None:
        del os.environ[_VARIABLE]
    else:
        os.environ[_VARIABLE] = _given
