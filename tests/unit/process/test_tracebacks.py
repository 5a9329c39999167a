"""An uncaught error is shown with the user's frames, and without those inside commlib unless commlib is at fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from commlib import errors
from commlib.errors import UsageError
from commlib.pipeline.rows import each
from commlib.process.tracebacks import entered_call, fold_text, format_error, message_of
from commlib.schedule.registry import program
from commlib.tensor_verbs import VerbMaker


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def train() -> None:
    program("all_reduce", "rign", 0, 2)


def fail(where: object, value: object) -> None:
    raise ValueError(f"{value} is\nout of luck")


def test_frames_inside_commlib_become_one_line() -> None:
    error = caught(train)
    text = format_error(error)
    assert "(2 frames inside commlib; COMMLIB_TRACEBACK=full shows them)\n" in text
    assert "registry.py" not in text and 'program("all_reduce", "rign", 0, 2)' in text
    assert text.endswith("double_tree, direct; did you mean 'ring'?\n")
    assert entered_call(error.__traceback__) == "program"


def test_all_frames_are_shown_on_request() -> None:
    text = format_error(caught(train), full=True)
    assert text.count("registry.py") == 2 and "frames inside" not in text


def test_frames_between_those_of_the_user_are_folded_too() -> None:
    error = caught(lambda: each(fail, 0, 7))
    text = format_error(error)
    assert re.search(r"in <lambda>\n.*\n(.*\^\n)?  \(1 frame inside commlib; .*\)\n  File .* in fail\n", text), text
    assert text.endswith("ValueError: 7 is\nout of luck\n")
    assert entered_call(error.__traceback__) == ""


def test_frames_stay_if_commlib_itself_fails() -> None:
    text = format_error(caught(lambda: each(None, 0, 7)))  # type: ignore[arg-type]
    assert "rows.py" in text and "frames inside" not in text


def _all_reduce(tensor: Any, op: str = "sum") -> Any:
    return tensor + 1


verbs: Any = VerbMaker("a module", "Tensor")(_all_reduce)
all_reduce, all_reduce_async = verbs


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: all_reduce(opp="mean", tensor=0),
            "all_reduce() got an unexpected keyword argument 'opp'; did you mean 'op'?",
        ),
        (lambda: all_reduce_async(0, 1, 2), "all_reduce_async() too many positional arguments"),
        (lambda: all_reduce(), "all_reduce() missing a required argument: 'tensor'"),
    ],
)
def test_a_call_with_wrong_arguments_names_the_function_called(call: Callable[[], object], text: str) -> None:
    """Python named the method that builds the call, and the frames inside commlib were shown."""
    shown = format_error(caught(call))
    assert shown.endswith(f"(2 frames inside commlib; COMMLIB_TRACEBACK=full shows them)\nTypeError: {text}\n")


def test_a_type_error_of_the_call_itself_is_unchanged() -> None:
    assert "unsupported operand" in str(caught(lambda: all_reduce(None)))


def test_the_cause_of_an_error_is_folded_too() -> None:
    def translate() -> None:
        try:
            train()
        except UsageError as error:
            raise RuntimeError("no schedule") from error

    text = format_error(caught(translate))
    assert "direct cause" in text and text.count("(2 frames inside commlib") == 1 and "registry.py" not in text


TRACED = """in user code:

    File "{user}", line 9, in step  *
        return ct.all_reduce(x)
    File "/site-packages/tensorflow/python/autograph/impl/api.py", line 643, in wrapper
        return func(*args, **kwargs)
    File "{ours}", line 69, in all_reduce  **
        raise same from same.__cause__
    File "{ours}", line 30, in run

    UsageError: no such tensor
"""
IN_NODE = """Graph execution error:

Detected at node commlib/PyFunc defined at (most recent call last):
  File "{user}", line 9, in step

  File "{ours}", line 69, in all_reduce

  File "{ours}", line 30, in run

UsageError: no such tensor
Traceback (most recent call last):

  File "{ours}", line 69, in call_host
    return list(host(*map(of, given)))
                ^^^^^^^^^^^^^^^^^^^^^

commlib.errors.UsageError: no such tensor


\t [[{{{{node commlib/PyFunc}}}}]] [Op:__inference_step_18]"""


@pytest.mark.parametrize(("text", "count"), [(TRACED, 3), (IN_NODE, 2)], ids=["traced", "in a node"])
def test_frames_in_the_text_of_tensorflow_are_folded(text: str, count: int) -> None:
    folded, call = fold_text(text.format(user=__file__, ours=errors.__file__))
    assert call == "all_reduce"
    assert folded.count("no such tensor") == 1 and folded.endswith("UsageError: no such tensor")
    assert errors.__file__ not in folded and "line 9, in step" in folded
    assert f"({count} frames inside commlib; COMMLIB_TRACEBACK=full shows them)\n" in folded
    assert fold_text(folded)[0] == folded


def test_frames_of_the_user_in_a_node_stay() -> None:
    text = IN_NODE.format(user=__file__, ours=__file__)
    assert fold_text(text)[0].count("line 69, in call_host") == 1
    assert fold_text("a text\n  without frames") == ("a text\n  without frames", "")


def test_a_misspelled_name_gets_pythons_own_hint() -> None:
    assert format_error(caught(lambda: "".jion)).endswith("'jion'. Did you mean: 'join'?\n")  # type: ignore[attr-defined]
    assert format_error(caught(lambda: trainn())).endswith("'trainn' is not defined. Did you mean: 'train'?\n")  # type: ignore[name-defined]  # noqa: F821
    assert format_error(caught(lambda: "".xyzzyx)).endswith("'xyzzyx'\n")  # type: ignore[attr-defined]


def test_errors_whose_text_or_names_fail_are_reported() -> None:
    """The report, and the end of the job, must not depend on code of the user."""

    class Weird(Exception):
        def __str__(self) -> str:
            raise RuntimeError("str fails")

    class Lazy:
        def __dir__(self) -> Any:
            raise RuntimeError("dir fails")

    assert message_of(Weird()) == "<exception str() failed>"
    assert format_error(Weird()).endswith("Weird: <exception str() failed>\n")
    error = caught(lambda: Lazy().absent)  # type: ignore[attr-defined]
    assert format_error(error).endswith("'Lazy' object has no attribute 'absent'\n")
