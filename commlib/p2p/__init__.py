"""Point to point: messages, lanes of shared memory, and channels, on hosts and devices."""
