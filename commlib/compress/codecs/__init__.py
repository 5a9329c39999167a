"""Codecs: encode float32 arrays in fewer bytes, and decode them."""
