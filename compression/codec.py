"""Every codec by its name, and the words to speak of codecs. Importing this imports torch."""

from .interface import Codec, CodecError, Encoded, Spec
from .raw import RawCodec

__all__ = ["CODECS", "Codec", "CodecError", "Encoded", "Spec"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(),)}
"""What a payload's codec name may be; another name is refused."""
