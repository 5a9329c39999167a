"""Compression: codecs encode arrays as bytes, and schemes reduce gradients with them.

This package does not depend on a framework. `scheme_of("int8")` and `codec_of("int8")` take names; the classes take
options.
"""

from commlib.compress import activations
from commlib.compress.auto import Auto
from commlib.compress.codec import Codec
from commlib.compress.codecs.cast import Cast, Float8
from commlib.compress.codecs.quantise import QSGD, Blocks
from commlib.compress.codecs.sign import Sign
from commlib.compress.codecs.sparse import RandomK, TopK
from commlib.compress.registry import CODECS, SCHEMES, codec_of, scheme_of
from commlib.compress.scheme import Scheme
from commlib.compress.schemes.all_gather import AllGather
from commlib.compress.schemes.all_to_all import AllToAll
from commlib.compress.schemes.dgc import DGC
from commlib.compress.schemes.power_sgd import PowerSGD

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "SCHEMES",
    "AllGather",
    "AllToAll",
    "Auto",
    "Blocks",
    "Cast",
    "Codec",
    "Float8",
    "PowerSGD",
    "RandomK",
    "Scheme",
    "Sign",
    "TopK",
    "activations",
    "codec_of",
    "scheme_of",
]
