"""Device memory of two ranks of a node: mapped buffers, and flags that order their copies."""
