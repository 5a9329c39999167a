"""Bodies of tests that several suites run, on other transports and devices."""
