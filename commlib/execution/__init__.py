"""Execution: run the program of a rank on arrays of any size, and persistent programs on small ones."""
