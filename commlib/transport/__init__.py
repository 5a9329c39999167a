"""Transports: messages between ranks, by MPI or between threads of one process."""
