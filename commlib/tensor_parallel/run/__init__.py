"""Tensor parallelism at run time: collectives between sharded layers, and their gradients."""
