"""Operations without a name from the user."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from commlib.coordinator.unnamed_ops import UnnamedOps


def pending(name: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(name=name))


def test_names_rotate_per_verb() -> None:
    unnamed = UnnamedOps()
    names = [unnamed.next_name("allreduce") for _ in range(130)]
    assert len(set(names[:64])) == 64 and names[64:128] == names[:64] and names[128:] == names[:2]
    assert unnamed.next_name("broadcast") not in names
    assert all(map(unnamed.is_unnamed, names)) and not unnamed.is_unnamed("loss")
    unnamed.restart_count()
    assert unnamed.next_name("allreduce") == names[0]


def test_deferred_operations_come_in_order_once_their_name_is_free() -> None:
    unnamed = UnnamedOps()
    first, second, other = pending("a"), pending("a"), pending("b")
    for each in (first, second, other):
        unnamed.hold_back(each)
    used = {"a", "b"}
    assert list(unnamed.due(used)) == []
    used.clear()
    arrived = []
    for each in unnamed.due(used):  # launching an operation uses its name
        arrived.append(each)
        used.add(each.request.name)
    assert arrived == [first, other] and unnamed.waiting() == [second]
    assert list(unnamed.due({"b"})) == [second] and unnamed.waiting() == []
