# A script written for Horovod. One line of it was changed:
#
#     import horovod.tensorflow.keras as hvd    ->    import commlib_tensorflow.keras as hvd
#
#     mpirun -n 2 python examples/horovod_keras.py

import os
import sys
import tempfile

import numpy as np
import tensorflow as tf
from digits import load_digits

import commlib_tensorflow.keras as hvd

hvd.init()

# One GPU for each process.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits()
images = images[..., np.newaxis]
train, test = (images[:1440], labels[:1440]), (images[1440:], labels[1440:])
dataset = tf.data.Dataset.from_tensor_slices(train).repeat().shuffle(1440, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(2),
        tf.keras.layers.Dropout(0.2),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

# The learning rate is for the batches of all processes together.
scaled_lr = 0.002 * hvd.size()
optimizer = tf.keras.optimizers.Adam(scaled_lr)
optimizer = hvd.DistributedOptimizer(
    optimizer, backward_passes_per_step=1, average_aggregated_gradients=True, compression=hvd.Compression.none
)
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    # All processes start from the weights and the optimizer of the first one.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Metrics of all processes, for the callbacks below.
    hvd.callbacks.MetricAverageCallback(),
    # A large learning rate from the first step on would not do well.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=0.2, start_epoch=4),
    tf.keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
]
# Only the first process writes checkpoints.
directory = tempfile.mkdtemp()
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(os.path.join(directory, "checkpoint-{epoch}.keras")))

model.fit(
    dataset,
    steps_per_epoch=90 // hvd.size(),
    epochs=5,
    validation_data=test,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)

# Every process has a part of the test.
part = [array[hvd.rank() :: hvd.size()] for array in test]
loss, accuracy = model.evaluate(*part, verbose=0)
accuracy = hvd.allreduce(accuracy, name="accuracy")
if hvd.rank() == 0:
    print(f"test accuracy: {accuracy:.2%}")
    restored = hvd.load_model(os.path.join(directory, "checkpoint-5.keras"))
    assert restored.optimizer.iterations.numpy() == model.optimizer.iterations.numpy()
sys.exit(0 if accuracy > 0.85 else 1)
