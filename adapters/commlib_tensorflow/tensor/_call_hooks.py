"""Call hooks: run a function before each call of a model, inside it, after Keras has prepared the arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from commlib.horovod.wrapping import change_class


class CallHook:
    """A model with a call hook."""


def hook_calls(model: Any, hook: Callable[[tuple[Any, ...], Mapping[str, Any]], Callable[[], None] | None]) -> None:
    """Call `hook` with the arguments of each call of a model, before the call. The model keeps its `__class__`.

    `hook` may return a function to run after a successful call. A new hook replaces the previous one.
    """

    def with_hook(call: Callable[..., Any], given: int) -> Any:
        @functools.wraps(call)
        def calling(*args: Any, **options: Any) -> Any:
            after = hook(args[given:], options)
            result = call(*args, **options)
            if after is not None:
                after()
            return result

        return calling

    if "call" in vars(model):  # set by a user, for example tf.function(model.call)
        model.call = with_hook(model.call, 0)
        return
    own, plain = type(model), model.__class__
    if CallHook in own.__bases__:
        vars(object)["__class__"].__set__(model, own.plain_class)
    change_class(model, CallHook, call=with_hook(type(model).call, 1), __class__=property(lambda self: plain))
