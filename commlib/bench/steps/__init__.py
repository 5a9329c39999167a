"""`commlib bench step`: a training step with the parallel layers, compared with the same computation alone."""
