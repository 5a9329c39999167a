"""Horovod's API on torch tensors: `import commlib_torch as hvd` has all of it."""
