"""Launch: find the launcher, load the MPI library that it belongs to, and start MPI."""
