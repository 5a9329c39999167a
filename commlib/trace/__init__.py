"""Traces: read the timelines of all ranks, put them on one clock, merge them, and say who waited for whom.

Needs neither MPI nor numpy. `files.read_all` reads, `align.align` finds the clocks, `merge.merged` and
`summary.summarise` do the rest; profiles of PyTorch and TensorFlow can be merged in.
"""
