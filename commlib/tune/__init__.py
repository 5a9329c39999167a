"""Which algorithm is the fastest here: a cost model, times that were measured, and a chooser over both."""
