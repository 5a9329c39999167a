"""Traces: read the timelines of all ranks, put them on one clock, merge them, and report the waits of ranks for others.

Needs neither MPI nor numpy. `files.read_all` reads, `align.align` finds the clocks, `merge.merged` and
`summary.summarise` produce the output. Profiles of PyTorch and TensorFlow can be merged in.
"""
