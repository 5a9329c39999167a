"""Gradients in arrays: reduced in program order, or matched by name among ranks that compute them in any order."""
