"""Moves and divided layers on TensorFlow's tensors of the late device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.late import LATE
from tests.tensorflow_adapter import device_layers
from tests.tensorflow_adapter.late import HostTensors, watched


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTensors]:
    monkeypatch.setattr(LATE, "delay", 1e-3)
    yield from watched()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_moves(comm: Any, place: HostTensors, traced: bool) -> None:
    device_layers.moves(comm, place, traced)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_sequences(comm: Any, place: HostTensors, method: str, traced: bool) -> None:
    device_layers.sequences(comm, place, method, traced)


@pytest.mark.ranks(min=2)
def test_divided_layers(comm: Any, place: HostTensors) -> None:
    device_layers.divided_layers(comm, place)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("signals", [True, False], ids=["streams signal", "by the host"])
def test_stages(comm: Any, place: HostTensors, signals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LATE, "has_signals", signals)
    ranks = comm.split(0)  # properties of streams are cached per communicator
    device_layers.stages(ranks, place)
