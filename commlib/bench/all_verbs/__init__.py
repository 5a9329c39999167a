"""The table of `commlib bench all`: every verb in every form against MPI, and its comparison with another."""
