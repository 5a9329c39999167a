"""Pipeline parallelism: the stages of a model on several ranks, run by a schedule over microbatches."""
