"""Checks of sharded models: compare outputs and gradients with the unsharded model's."""
