"""Whereabouts: of which experts a rank's weights are, in files of `tf.train.Checkpoint`, which know variables alone."""

from __future__ import annotations

import json
import weakref
from typing import Any

import tensorflow as tf


class Whereabouts(tf.train.experimental.PythonState):  # type: ignore[misc]  # TensorFlow has no types
    """What a layer's weights are parts of: saved and restored with them.

    Collective to restore where experts have been elsewhere.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)

    def belongs_to(self, layer: Any) -> None:
        """Be that of another layer, which has become this one."""
        self._layer = weakref.ref(layer)

    def serialize(self) -> str:
        """Return what is saved."""
        return json.dumps(self._owner().mixture.placement.owners)

    def deserialize(self, string_value: Any) -> None:
        """Take over what was saved."""
        self._owner().put_owners(tuple(json.loads(string_value)))

    def _owner(self) -> Any:
        layer = self._layer()
        assert layer is not None  # it keeps this
        return layer
