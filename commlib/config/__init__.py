"""Settings: one table with defaults, read from the environment and from a file."""
