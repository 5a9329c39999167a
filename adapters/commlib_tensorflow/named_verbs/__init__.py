"""Named operations on TensorFlow's tensors: ranks may call them in any order."""
