"""The benchmarks' gloo leaves without a race."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from commlib.bench import gloo_peer

pytestmark = [pytest.mark.any_ranks, pytest.mark.any_mpi]


def test_stores_end_before_their_folder_is_removed(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose file vanished while it ended aborted its process, on a loaded machine."""
    pytest.importorskip("torch")
    left = []

    class Folder(tempfile.TemporaryDirectory[str]):
        def __exit__(self, *error: Any) -> None:
            left.append([path.name for path in Path(self.name).iterdir()])  # the last store to end removes its file
            super().__exit__(*error)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Folder)
    with gloo_peer.join_gloo(MPI.COMM_WORLD, one_node=True):
        pass
    assert left == [[]]
