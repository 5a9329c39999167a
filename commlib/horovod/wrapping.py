"""Wrapping: change the class of a user's object, so that every reference to it stays valid."""

from __future__ import annotations

from typing import Any


def change_class(wrapped: Any, mixin: type, **more: Any) -> None:
    """Make an object an instance of `mixin` and its current class, under that class's name. `more` are attributes."""
    plain = type(wrapped)
    names: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    names |= {"plain_class": plain, **more}
    changed = type(plain.__name__, (mixin, plain), names)
    vars(object)["__class__"].__set__(wrapped, changed)  # bypasses a `__class__` property that names another class


class PlainPickling:
    """Makes pickles and copies of the plain class, because a communicator belongs to this process."""

    plain_class: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return pickle's reduction of the object, as an instance of the plain class.

        Protocol 0, because later protocols insist on the current class of the object.
        """
        reduced: Any = super().__reduce_ex__(0)
        arguments = tuple(self.plain_class if item is type(self) else item for item in reduced[1])
        function = reduced[0]
        if getattr(function, "__self__", None) is type(self):  # a method of the class, as Keras has it
            function = getattr(self.plain_class, function.__name__)
        return (function, arguments, *reduced[2:])
