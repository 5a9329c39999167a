"""Methods that do not keep their object alive."""

from __future__ import annotations

from commlib.group.weak import weakly


def test_a_call_does_nothing_once_the_object_is_gone() -> None:
    seen: list[int] = []

    class Listener:
        def hear(self, number: int) -> None:
            seen.append(number)

    listener = Listener()
    hear = weakly(listener.hear)
    hear(1)
    del listener
    hear(2)
    assert seen == [1]
