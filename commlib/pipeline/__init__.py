"""Pipeline parallelism: a model in stages on several ranks, run by a schedule over microbatches."""
