"""Slurm: write batch scripts, submit them, wait for their jobs and collect the results. Imports no MPI."""
