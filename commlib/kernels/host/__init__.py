"""Host kernels, compiled by numba.

If colorama is installed, numba writes escape codes to standard output at the end of a program that has compiled a
kernel. numba reads this variable when it is imported, so the variable is set only during the import.
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
