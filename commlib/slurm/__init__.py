"""Slurm: write batch scripts, submit them, wait for their jobs and collect what came of them. Imports no MPI."""
