"""Gradients reduced by name: a coordinator matches them among ranks that compute them in any order."""
