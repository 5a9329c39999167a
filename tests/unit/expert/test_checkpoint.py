"""Files of experts: state of another optimizer is refused, and momentum is converted between frameworks by the rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.expert.checkpoint import MOMENTUM, UPDATE, check, check_states, momentum, read

GRADIENTS = np.array([1.0, -2.0])


def test_momentum_in_the_same_form_is_unchanged() -> None:
    """Files held it divided by one rate, and loading multiplied it by another: NaN at 0."""
    for form in (MOMENTUM, UPDATE):
        np.testing.assert_array_equal(momentum({f"router/{form}": GRADIENTS}, "router", form, 0.0), GRADIENTS)


def test_converted_momentum_gives_the_next_step_of_the_other_framework() -> None:
    """PyTorch's is -rate * 0.9 * momentum, Keras' 0.9 * update, for the rate of that step."""
    rate = 0.25
    update = momentum({"router/momentum": GRADIENTS}, "router", UPDATE, rate)
    np.testing.assert_array_equal(0.9 * update, -rate * 0.9 * GRADIENTS)
    np.testing.assert_array_equal(momentum({"router/update": update}, "router", MOMENTUM, rate), GRADIENTS)


@pytest.mark.parametrize(("has", "wanted"), [(MOMENTUM, UPDATE), (UPDATE, MOMENTUM)])
def test_momentum_cannot_be_converted_at_rate_0(has: str, wanted: str) -> None:
    with pytest.raises(UsageError, match="the learning rate, which is 0 now"):
        momentum({f"router/{has}": GRADIENTS}, "router", wanted, 0.0)


def test_state_of_another_optimizer_is_refused() -> None:
    file = [{"router": GRADIENTS, "router/first": GRADIENTS, "router/second": GRADIENTS, "router/step": GRADIENTS}]
    check_states(file, [{"router": ("first", "second")}], "Adam")
    with pytest.raises(UsageError, match="layer 0: the optimizer state of router in the file is first, second, but"):
        check_states(file, [{"router": ("update",)}], "SGD")
    with pytest.raises(UsageError, match="the optimizer state of router in the file is none, but Adam keeps first"):
        check_states([{"router": GRADIENTS}], [{"router": ("first", "second")}], "Adam")
    with pytest.raises(UsageError, match=r"layer 0 \(block\.moe\): the optimizer state .* but SGD keeps none\. Give"):
        check_states(file, [{"router": ()}], "SGD", ["block.moe"])
    check_states([{"router/momentum": GRADIENTS}], [{"router": ("update",)}], "SGD")


def test_layers_of_another_model_are_named() -> None:
    with pytest.raises(UsageError, match=r"layer 0 \(block\.moe\): router has shape \[2\], expected \[3\]"):
        check([{"router": GRADIENTS}], [{"router": (3,)}], ["block.moe"])
    with pytest.raises(UsageError, match="layer 0: the file has no shared: it has another kind of expert"):
        check([{"router": GRADIENTS}], [{"shared": (3,)}])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"experts\.npz is not a file written by save_experts: .*No such file"):
        read(tmp_path / "experts.npz")


@pytest.mark.parametrize(
    "content, problem",
    [
        ({"kinds": np.array([{}], object)}, "it has Python objects, which commlib neither writes nor loads"),
        ({"other": np.zeros(2)}, "kinds is not a file in the archive"),
        (b"text", "it is not an npz file, or not complete"),
        (b"", "it is not an npz file, or not complete"),
    ],
)
def test_other_files_are_refused(content: bytes | dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "experts.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(UsageError, match=rf"experts\.npz is not a file written by save_experts: .?{problem}"):
        read(path)
