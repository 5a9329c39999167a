"""Schemes: reduce the gradients of a bucket in fewer bytes."""
