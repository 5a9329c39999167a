"""Sharding: which part of an array each rank holds, and the ranks that hold parts."""
