"""Methods that do not keep their object alive."""

from __future__ import annotations

from commlib.group.weak_references import make_weak_method


def test_a_call_does_nothing_after_the_object_is_freed() -> None:
    seen: list[int] = []

    class Listener:
        def hear(self, number: int) -> None:
            seen.append(number)

    listener = Listener()
    notify = make_weak_method(listener.hear)
    notify(1)
    del listener
    notify(2)
    assert seen == [1]
