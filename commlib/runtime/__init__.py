"""Runtime: compiled calls, the progress thread, handles of operations, the watchdog and hang detection."""
