"""Horovod's API for Keras: the names of `import horovod.tensorflow.keras as hvd`.

import commlib_tensorflow.keras as hvd

hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss)
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

Optimizers may be from Keras 3 or tf_keras; callbacks and `load_model` are for the version that `tf.keras` is.
"""

import typing as _typing

from commlib import __version__
from commlib import horovod as _horovod
from commlib.arguments import missing_attribute as _missing_attribute
from commlib.horovod import *
from commlib_tensorflow.broadcast import allgather_object, broadcast_object, broadcast_variables
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.keras import _values, callbacks, elastic
from commlib_tensorflow.keras._models import DistributedOptimizer, PartialDistributedOptimizer, load_model
from commlib_tensorflow.keras._values import *
from commlib_tensorflow.one_bit import OneBitAdam, OneBitLAMB

__all__ = [
    "__version__",
    "Compression",
    "DistributedOptimizer",
    "OneBitAdam",
    "OneBitLAMB",
    "PartialDistributedOptimizer",
    "allgather_object",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
]
__all__ += _horovod.__all__
__all__ += _values.__all__

if not _typing.TYPE_CHECKING:  # type checkers have the names

    def __getattr__(name: str) -> object:
        raise _missing_attribute(f"module {__name__!r}", name, __all__)
