"""Compression: less to send. Codecs turn arrays into bytes, schemes reduce gradients with them.

Nothing here knows a framework. `scheme_of("int8")` and `codec_of("int8")` understand names; the classes take options.
"""

from commlib.compress import edges
from commlib.compress.auto import Auto
from commlib.compress.cast import Cast, Float8
from commlib.compress.codec import Codec
from commlib.compress.dgc import DGC
from commlib.compress.exchange import Exchanged
from commlib.compress.gather import Gathered
from commlib.compress.gradients import GradientCompression
from commlib.compress.names import CODECS, SCHEMES, Compression, codec_of, scheme_of
from commlib.compress.power_sgd import PowerSGD
from commlib.compress.quantise import QSGD, Blocks
from commlib.compress.scheme import Part, Reducer, Scheme
from commlib.compress.sign import Sign
from commlib.compress.sparse import RandomK, TopK

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "SCHEMES",
    "Auto",
    "Blocks",
    "Cast",
    "Codec",
    "Compression",
    "Exchanged",
    "Float8",
    "Gathered",
    "GradientCompression",
    "Part",
    "PowerSGD",
    "RandomK",
    "Reducer",
    "Scheme",
    "Sign",
    "TopK",
    "codec_of",
    "edges",
    "scheme_of",
]
