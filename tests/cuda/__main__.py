"""Run a program on the stand-in for CuPy: python -m tests.cuda PROGRAM [ARGUMENTS...]."""

import runpy
import sys

from tests.cuda import standin

standin.install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
