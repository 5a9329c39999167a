"""Codecs: turn float32 arrays into fewer bytes, and back."""
