"""Host memory: views of users' arrays, symmetric memory, memory shared within a node."""
