"""Tuning: choose the algorithm that is fastest here, by a cost model and by times that were measured."""
