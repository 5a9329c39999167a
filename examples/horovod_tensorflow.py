# A script written for Horovod. One line of it was changed:
#
#     import horovod.tensorflow as hvd    ->    import commlib_tensorflow.horovod as hvd
#
#     mpirun -n 2 python examples/horovod_tensorflow.py
#
# (The next two lines are for this project's linters.)
# mypy: ignore-errors
# ruff: noqa: B905

import os
import sys
import tempfile

import tensorflow as tf
from digits import load_digits

import commlib_tensorflow.horovod as hvd

hvd.init()

# One GPU for each process.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits()
images = images.reshape(-1, 64)
dataset = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
dataset = dataset.repeat().shuffle(1440, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
# The learning rate is for the batches of all processes together.
optimizer = tf.optimizers.Adam(0.002 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))

    # Average the gradients of all processes.
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.none)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    # All processes continue from the weights and the optimizer of the first one. The first step has made all variables.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss_value


for batch, (x, y) in enumerate(dataset.take(400 // hvd.size())):
    loss_value = training_step(x, y, batch == 0)
    if batch % 50 == 0 and hvd.local_rank() == 0:
        print(f"step {batch}  loss {loss_value:.3f}", flush=True)

# Only the first process writes checkpoints.
if hvd.rank() == 0:
    checkpoint.save(os.path.join(tempfile.mkdtemp(), "checkpoint"))

right = tf.reduce_mean(tf.cast(tf.argmax(model(images[1440:]), axis=1) == labels[1440:], tf.float32))
accuracy = hvd.allreduce(right, name="accuracy")
if hvd.rank() == 0:
    print(f"test accuracy: {accuracy:.2%}")
sys.exit(0 if accuracy > 0.85 else 1)
