"""A step of training with the parallel layers, beside the same computation alone: `commlib bench step`."""
