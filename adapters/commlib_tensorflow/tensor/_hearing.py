"""Hearing: of each call of a model, from within it, when Keras has made its arguments ready."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from commlib.horovod.wrapping import change_class


class Heard:
    """A model of whose calls somebody hears."""


def hear_calls(model: Any, hear: Callable[[tuple[Any, ...], Mapping[str, Any]], Callable[[], None] | None]) -> None:
    """Let `hear` be called with the arguments of each call of a model, before it. To others it is what it was.

    It may return who wants to hear if the call does not fail. Who has heard of them before does so no more.
    """

    def heard(call: Callable[..., Any], given: int) -> Any:
        @functools.wraps(call)
        def calling(*args: Any, **options: Any) -> Any:
            after = hear(args[given:], options)
            result = call(*args, **options)
            if after is not None:
                after()
            return result

        return calling

    if "call" in vars(model):  # put there by a user: such as tf.function(model.call)
        model.call = heard(model.call, 0)
        return
    own, plain = type(model), model.__class__
    if Heard in own.__bases__:
        vars(object)["__class__"].__set__(model, own.plain_class)
    change_class(model, Heard, call=heard(type(model).call, 1), __class__=property(lambda self: plain))
