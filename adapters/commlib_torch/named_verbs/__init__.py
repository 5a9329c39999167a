"""Named operations on torch tensors: ranks may call them in any order."""
