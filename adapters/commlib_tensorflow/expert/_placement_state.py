"""Expert placement in `tf.train.Checkpoint` files, which otherwise hold only variables."""

from __future__ import annotations

import json
import weakref
from typing import Any

import tensorflow as tf


class PlacementState(tf.train.experimental.PythonState):  # type: ignore[misc]  # TensorFlow has no types
    """The placement of a layer's experts, saved and restored with the weights.

    Restoring is collective if the experts were on other ranks.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)

    def attach_to(self, layer: Any) -> None:
        """Attach the placement to another layer, which has become this one."""
        self._layer = weakref.ref(layer)

    def serialize(self) -> str:
        """Return the placement as JSON."""
        return json.dumps(self._owner().mixture.placement.owners)

    def deserialize(self, string_value: Any) -> None:
        """Restore the placement from JSON."""
        self._owner().put_owners(tuple(json.loads(string_value)))

    def _owner(self) -> Any:
        layer = self._layer()
        assert layer is not None  # the layer keeps this object
        return layer
