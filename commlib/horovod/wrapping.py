"""Change the class of a user's object instead of wrapping it: whoever refers to it goes on using it."""

from __future__ import annotations

from typing import Any


def change_class(wrapped: Any, mixin: type, **more: Any) -> None:
    """Make an object an instance of `mixin` and of its own class, under the name of that. `more` are attributes."""
    plain = type(wrapped)
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__, **more}
    wrapped.__class__ = type(plain.__name__, (mixin, plain), names)
