"""A training script of Keras: calls that a checker refuses."""

import keras

import commlib
import commlib_tensorflow as ct

mesh = commlib.Mesh(pp=2, dp=-1, tp=2)
model = keras.Sequential([keras.layers.Dense(4)])

ct.all_reduce(keras.ops.ones(3), "men")  # error: arg-type
ct.all_reduce(keras.ops.ones(3), comm=mesh["dp"])  # error: call-arg
print(ct.Sequence)  # error: attr-defined
ct.alreduce(1)  # error: attr-defined
ct.parallelize(model, mesh["tp"], "atuo")  # error: arg-type
ct.parallelize(model, "tp", "auto")  # error: arg-type
ct.pipeline(model, mesh["pp"], schedule="1f2b", microbatches=4)  # error: arg-type
ct.pipeline(model, mesh["pp"], microbatches=4, split="atuo")  # error: arg-type
ct.scan(keras.ops.ones(3), "mean")  # error: arg-type
ct.MoE(ct.Experts(8, drop="first"), mesh)  # error: arg-type
ct.DistributedOptimizer(keras.optimizers.SGD(), op="men")  # error: arg-type
ct.DistributedOptimizer(keras.optimizers.SGD(), op="max")  # error: arg-type
ct.DistributedOptimizer(keras.optimizers.SGD(), ranks="dp")  # error: arg-type
ct.Checkpoint("run", model=model, ranks=3)  # error: arg-type
ct.context.shard_sequence(keras.ops.ones(3), mesh["tp"], layout="zigzag")  # error: arg-type

optimizer = ct.DistributedOptimizer(keras.optimizers.SGD())
print(optimizer.report.exposed_seconds)  # error: union-attr
optimizer.load_compression_state(3)  # error: arg-type
