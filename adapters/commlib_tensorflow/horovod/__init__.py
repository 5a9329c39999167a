"""Horovod's API on TensorFlow's tensors: `import commlib_tensorflow as hvd` has all of it."""
