"""Fields: the numbers by which Python and compiled code find their common data. They need no compiler."""
