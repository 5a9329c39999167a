"""Tuning: measure a cluster and its algorithms, for the cost model and for the table of measured times."""
