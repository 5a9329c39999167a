"""The benchmarks' gloo peer: it shuts down without a race."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from commlib.bench import gloo_peer

pytestmark = [pytest.mark.any_ranks, pytest.mark.any_mpi]


def test_stores_close_before_their_folder_is_removed(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose file vanished while it closed aborted its process, on a loaded machine."""
    pytest.importorskip("torch")
    leftovers = []

    class Folder(tempfile.TemporaryDirectory[str]):
        def __exit__(self, *error: Any) -> None:
            leftovers.append(
                [path.name for path in Path(self.name).iterdir()]
            )  # the last store to close removes its file
            super().__exit__(*error)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Folder)
    with gloo_peer.join_gloo(MPI.COMM_WORLD, one_node=True):
        pass
    assert leftovers == [[]]
