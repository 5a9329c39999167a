"""`python -m commlib`: the command line, for when the `commlib` script is not on the PATH."""

from __future__ import annotations

from commlib.cli import main

if __name__ == "__main__":
    main()
