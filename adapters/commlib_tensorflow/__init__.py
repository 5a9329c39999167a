"""The TensorFlow adapter: not there yet. The core works on numpy arrays; `commlib_torch` is the adapter for PyTorch."""

raise ImportError(
    "commlib_tensorflow is not there yet: commlib has no TensorFlow adapter in this version. "
    "The core (import commlib) works on numpy arrays, and commlib_torch is the adapter for PyTorch"
)
