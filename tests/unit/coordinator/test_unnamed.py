"""Operations that the user gives no name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from commlib.coordinator.unnamed_ops import UnnamedOps


def pending(name: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(name=name))


def test_names_come_round_and_each_verb_has_its_own() -> None:
    unnamed = UnnamedOps()
    names = [unnamed.next_name("allreduce") for _ in range(130)]
    assert len(set(names[:64])) == 64 and names[64:128] == names[:64] and names[128:] == names[:2]
    assert unnamed.next_name("broadcast") not in names
    assert all(map(unnamed.is_unnamed, names)) and not unnamed.is_unnamed("loss")
    unnamed.restart_count()
    assert unnamed.next_name("allreduce") == names[0]


def test_what_is_put_off_comes_in_order_once_its_name_is_free() -> None:
    unnamed = UnnamedOps()
    first, second, other = pending("a"), pending("a"), pending("b")
    for each in (first, second, other):
        unnamed.hold_back(each)
    taken = {"a", "b"}
    assert list(unnamed.due(taken)) == []
    taken.clear()
    came = []
    for each in unnamed.due(taken):  # whoever takes it takes its name
        came.append(each)
        taken.add(each.request.name)
    assert came == [first, other] and unnamed.waiting() == [second]
    assert list(unnamed.due({"b"})) == [second] and unnamed.waiting() == []
