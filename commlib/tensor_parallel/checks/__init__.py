"""Checks of sharded models: compare outputs and gradients with those of the unsharded model."""
