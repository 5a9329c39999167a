"""Paths of collectives for arrays in host memory: shared memory of a node, schedules of messages, MPI, hierarchies."""
