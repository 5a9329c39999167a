"""Groups: the ranks of a communicator, the sequence and check of their calls, and their hierarchy."""
