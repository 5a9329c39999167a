"""A training script of Keras, which has no types itself."""

from typing import assert_type

import keras

import commlib
import commlib_tensorflow as ct
from commlib.data_parallel import Statistics, StepReport

comm = ct.init()
assert_type(comm, commlib.Communicator)
mesh = commlib.Mesh(pp=2, dp=-1, tp=2)
model = keras.Sequential([keras.layers.Dense(4)])

optimizer = ct.DistributedOptimizer(keras.optimizers.SGD(0.1), op="sum", compression="int8", mesh=mesh)
assert_type(optimizer.report, StepReport | None)
assert_type(optimizer.statistics, Statistics)
assert_type(optimizer.exposed_seconds, float)
optimizer.register_local_var(model.variables[0])
optimizer.apply_gradients([])


def state(optimizer: ct.WrappedOptimizer) -> dict[str, object]:
    """Return what compression remembers."""
    return optimizer.compression_state()


state(ct.DistributedOptimizer(keras.optimizers.SGD(0.1), ranks=comm))
ct.all_reduce(keras.ops.ones(3), "mean", ranks=mesh["dp"], algorithm="ring")
ct.parallelize(model, mesh["tp"], {"up": ct.Column(), "norm": ct.tensor.Sequence(1)})
ct.parallelize(model, mesh["tp"], "auto")
ct.MoE(ct.Experts(8, hidden=16, scores="sigmoid"), mesh)
ct.OneBitAdam(freeze_step=10, ranks=mesh["dp"])
ct.scan(keras.ops.ones(3), "max", ranks=mesh["dp"])
ct.pipeline(model, mesh["pp"], microbatches=4, split=("a", "b"))
pipe = ct.pipeline(model, mesh["pp"], schedule="interleaved", microbatches=4, stages=4)
pipe.compile(optimizer, "mse")
assert_type(pipe.picture(), str)
ct.Checkpoint("run", model=model, ranks=mesh).save(1)
