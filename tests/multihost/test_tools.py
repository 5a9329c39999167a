"""Tools that emulate hosts: they are found where distributions put them."""

from __future__ import annotations

import os
import sys

from ci.hosts import SBIN, TOOLS, Hosts, missing_rights


def test_tools_outside_path(monkeypatch, tmp_path):
    """All tests of hosts were skipped where tc is in /usr/sbin and PATH has no such folder, as for users of Debian."""
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder not in SBIN]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    assert missing_rights() is None
    with Hosts(2, "1gbit") as hosts:
        done = hosts.run([sys.executable, "-c", "print('here')"], timeout=60, capture=True)
    assert (done.returncode, done.stdout.split()) == (0, ["here", "here"]), done.stderr


def test_missing_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("ci.hosts.SBIN", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_rights() == f"emulated hosts need {', '.join(TOOLS)}, not installed"
