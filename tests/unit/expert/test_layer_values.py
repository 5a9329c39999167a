"""Values of layers: ranks compare digests of them."""

from __future__ import annotations

import numpy as np

from commlib.expert.layer_values import digest_array


def test_arrays_have_digests() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    digest = digest_array(values)
    assert digest.kind == "array float32[2, 3]"
    assert digest.is_writable
    assert digest == digest_array(values.copy())
    assert digest.digest != digest_array(values + 1).digest
    values.flags.writeable = False
    assert not digest_array(values).is_writable


def test_long_arrays_of_objects_are_compared_whole() -> None:
    """Torch's arrays of objects were compared by numpy's text, which leaves out the middle of long ones."""
    names = np.array([f"token {number}" for number in range(2000)], dtype=object)
    others = names.copy()
    others[1000] = "another"
    assert repr(names) == repr(others)
    assert digest_array(names).digest != digest_array(others).digest
    assert not digest_array(names).is_writable
