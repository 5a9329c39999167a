"""Set-up for tests on emulated hosts; all are skipped, with the reason, where hosts cannot be created."""

from __future__ import annotations

import faulthandler
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.hosts import missing_rights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def rights() -> None:
    if reason := missing_rights():
        pytest.skip(f"no emulated hosts here: {reason}")


@pytest.fixture(scope="session", autouse=True)
def launch_environment(rights: None) -> Iterator[None]:
    """Return the additions of ci/env.sh, so that plain `pytest tests/multihost` works too, and the checkout's path."""
    command = 'source "$0" && env -0'
    done = subprocess.run(["bash", "-c", command, str(ROOT / "ci/env.sh")], check=True, capture_output=True, text=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (entry.split("=", 1) for entry in done.stdout.split("\0") if entry):
            patch.setenv(name, value)
        for path in (ROOT / "adapters", ROOT):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        # Unbuffered, print writes a line and its newline separately, and those of two ranks mix.
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        patch.chdir(ROOT)
        yield


@pytest.fixture(autouse=True)
def limits_of_their_own() -> None:
    """Let jobs take longer than one test may: each is a suite, whose tests are limited, and so is the job."""
    faulthandler.cancel_dump_traceback_later()
