"""Train in Keras, save and exit when a signal arrives, and resume when the job starts again.

    until mpirun -n 2 python examples/cluster/requeue_keras.py; do          # 75 requests another run
        [ $? = 75 ] || break
    done

At the end it prints a digest of the weights. The weights have the same bits, however often the run was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import commlib

EPOCHS, STEPS = 4, 50
BATCH = 32  # of each rank


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints", help="folder that all ranks see")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    with commlib.Preemption() as preemption:  # before slow imports: until here a signal ends the process
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import keras
        import numpy as np
        import tensorflow as tf

        import commlib_tensorflow.keras as ct

        ct.init()
        keras.utils.set_random_seed(ct.rank())  # for dropout, different on each rank
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((64,)), layers.Dense(128, activation="tanh"), layers.Dropout(0.1), layers.Dense(10)]
        )
        model.set_weights(ct.broadcast_object(model.get_weights(), root_rank=0))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(ct.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss)

        leaving = ct.callbacks.PreemptionCallback(preemption, arguments.checkpoints, model, steps_per_epoch=STEPS)
        done = leaving.resume()
        if ct.rank() == 0:
            print(f"from batch {done} on", flush=True)

        teacher = tf.random.stateless_normal((64, 10), (0, 0))

        def batch(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = tf.random.stateless_normal((BATCH, 64), (number, ct.rank()))  # data by number: it resumes, too
            return images, tf.argmax(images @ teacher, axis=1)

        model.fit(
            tf.data.Dataset.counter().skip(done).map(batch),
            initial_epoch=done // STEPS,
            epochs=arguments.epochs,
            steps_per_epoch=STEPS,
            callbacks=[leaving],
            verbose=0,
        )

    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    if ct.rank() == 0:
        print("weights", hashlib.blake2b(weights, digest_size=8).hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
