"""What a file is by its first bytes, where that is neither text nor bare token ids.

A packed archive, a table of parquet or a picture is read by no job as it lies; as text it would be
trained on without a word. Raw ids have no mark of their own, so of these only marks of four bytes
or more count, and what is looked at besides is whether the numbers can be ids at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .manifest import DataError

__all__ = ["HEAD_BYTES", "check_ids", "check_text"]

HEAD_BYTES = 1024
"""Bytes from a file's start that are looked at."""

_UNPACK, _CONVERT = "unpack it first", "write its text to a plain file first"
_IDS = 'write its ids as .npy, and set kind = "tokens"'
_ARRAYS = 'name it .npz or .safetensors, and set kind to "arrays" or "tokens"'

_MARKS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b\x08", "gzip", _UNPACK),
    (b"BZh", "bzip2", _UNPACK),
    (b"\xfd7zXZ\0", "xz", _UNPACK),
    (b"\x5d\0\0", "lzma", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "Zstandard", _UNPACK),
    (b"\x04\x22\x4d\x18", "LZ4", _UNPACK),
    (b"\xff\x06\0\0sNaPpY", "snappy", _UNPACK),
    (b"\x1f\x9d", "compress (.Z)", _UNPACK),
    (b"PK\x03\x04", "a zip archive (.zip, .npz, .docx, .xlsx, .pt)", _UNPACK),
    (b"PK\x05\x06", "an empty zip archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", _UNPACK),
    (b"Rar!\x1a\x07", "RAR", _UNPACK),
    (b"PAR1", "parquet", _CONVERT),
    (b"ARROW1", "Arrow", _CONVERT),
    (b"FEA1", "Feather", _CONVERT),
    (b"ORC", "ORC", _CONVERT),
    (b"Obj\x01", "Avro", _CONVERT),
    (b"\x89HDF\r\n\x1a\n", "HDF5", _CONVERT),
    (b"CDF\x01", "NetCDF", _CONVERT),
    (b"CDF\x02", "NetCDF", _CONVERT),
    (b"SQLite format 3\0", "SQLite", _CONVERT),
    (b"%PDF-", "PDF", _CONVERT),
    (b"%!PS-Adobe", "PostScript", _CONVERT),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", _CONVERT),
    (b"{\\rtf", "RTF", _CONVERT),
    (b"\x93NUMPY", "numpy (.npy)", _IDS),
    (b"MMIDIDX\0\0", "an index of Megatron", _IDS),
    (b"GGUF", "GGUF", "that is weights of a model"),
    (b"ggml", "GGML", "that is weights of a model"),
    (b"lmgg", "GGML", "that is weights of a model"),
    (b"\x7fELF", "a program (ELF)", _CONVERT),
    (b"MZ\x90\0", "a program of Windows", _CONVERT),
    (b"\0asm", "WebAssembly", _CONVERT),
    (b"\xca\xfe\xba\xbe", "a program (Java, Mach-O)", _CONVERT),
    (b"\x89PNG\r\n\x1a\n", "PNG", _CONVERT),
    (b"\xff\xd8\xff", "JPEG", _CONVERT),
    (b"GIF87a", "GIF", _CONVERT),
    (b"GIF89a", "GIF", _CONVERT),
    (b"II*\0", "TIFF", _CONVERT),
    (b"MM\0*", "TIFF", _CONVERT),
    (b"RIFF", "RIFF (.wav, .webp, .avi)", _CONVERT),
    (b"OggS", "Ogg", _CONVERT),
    (b"fLaC", "FLAC", _CONVERT),
    (b"ID3", "MP3", _CONVERT),
    (b"\x1aE\xdf\xa3", "Matroska (.mkv, .webm)", _CONVERT),
    (b"\x80\x02", "a pickle", _CONVERT),
    (b"\x80\x03", "a pickle", _CONVERT),
    (b"\x80\x04\x95", "a pickle", _CONVERT),
    (b"\x80\x05\x95", "a pickle", _CONVERT),
    (b"\xff\xfe\0\0", "UTF-32 text", "convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\0\0\xfe\xff", "UTF-32 text", "convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\xff\xfe", "UTF-16 text", "convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\xfe\xff", "UTF-16 text", "convert it to UTF-8 (iconv -t UTF-8)"),
)
"""First bytes, what has them, and what to do; the longer of two that begin alike stands first."""

_LATER = ((257, b"ustar", "tar", _UNPACK), (4, b"ftyp", "MP4", _CONVERT))
"""The same for marks that stand further in, with their place."""

_ENDINGS = {
    ".gz .bz2 .xz .zst .lz4 .zip .7z .rar .tar .tgz .br .lzma .z": ("packed", _UNPACK),
    ".parquet .arrow .feather .orc .avro .h5 .hdf5 .sqlite .db": ("a table", _CONVERT),
    ".tfrecord .tfrecords .mdb .lmdb .pkl .pickle .pt .pth .ckpt": ("a binary file", _CONVERT),
    ".npz .safetensors": ("named arrays", _ARRAYS),
    ".npy": ("an array", _IDS),
    ".pdf .docx .xlsx .pptx .epub": ("a document", _CONVERT),
    ".png .jpg .jpeg .gif .webp .mp3 .mp4 .wav": ("a picture or a recording", _CONVERT),
}
"""Ends of names, for kinds of files that have no mark, or whose mark was cut off."""

_LLM_C = {20240520: "llm.c for GPT-2", 20240801: "llm.c for Llama 3"}
"""First number of token files with a header of 256 int32."""
_FEW = 16
"""Ids below this times 2^16 are in every vocabulary: a higher half that never exceeds it belongs to
the id before it."""
_LEAST = 8


def check_text(name: str, head: bytes) -> None:
    """Raises DataError for a file that is no text, by its first HEAD_BYTES and its name."""
    kind, advice = _marked(head) or _wide(head) or _ended(name)
    if kind:
        raise DataError(f"{name} is no text but {kind}: {advice}")


def check_ids(name: str, ids: npt.NDArray[Any], head: bytes, *, sure: bool = False) -> None:
    """Raises DataError for a raw file of ids that begins as another kind of file does, or whose
    numbers are wider or in another order than they were read. ids: shape (n,), as they were read;
    `sure`: the file's name says their width, so that only marks are looked at."""
    number = int.from_bytes(head[:4], "little")
    if number in _LLM_C:
        raise DataError(
            f"{name} has the header of {_LLM_C[number]}, 1024 bytes that are no ids: write the ids "
            "alone (everything behind the header)"
        )
    if found := _marked(head, least=4):
        raise DataError(f"{name} is no file of bare ids but {found[0]}: {found[1]}")
    if ids.dtype != np.uint16 or sure or len(ids) < _LEAST:
        return
    high, low = ids[1::2], ids[0::2]
    empty = not high.any() and len(np.unique(low[:4096])) > 2
    if empty or high.max() < _FEW < low.max():
        wide = 8 if not ids[2::4].any() else 4
        raise DataError(
            f"{name} is read as uint16, and every second of its numbers is below {_FEW}: these are "
            f"ids of {wide} bytes. Let the name of ids of 4 bytes end in .int32.bin, write others "
            "as .npy; if they are uint16 after all, let it end in .uint16.bin"
        )
    if ids.any() and not (ids & 0xFF).any():
        raise DataError(
            f"{name} is read as little-endian uint16, and each of its numbers is a multiple of "
            "256: these are big-endian. Write them little-endian; if they are so already, let the "
            "name end in .uint16.bin"
        )


def _marked(head: bytes, least: int = 0) -> tuple[str, str] | None:
    """What begins so, and what to do. `least`: bytes that a mark must have."""
    binary = min(head, default=255) < 9  # a text may begin with the letters of a mark
    for mark, kind, advice in _MARKS:
        if len(mark) >= least and head.startswith(mark) and (binary or not mark.isalnum()):
            return kind, advice
    if least and head.startswith(b"\x1f\x8b\x08") and len(head) > 9 and head[3] < 32:
        return "gzip", _UNPACK  # a mark of three bytes and five bits
    for at, mark, kind, advice in _LATER:
        if head[at : at + len(mark)] == mark and len(mark) > 4 - (not least):
            return kind, advice
    size = int.from_bytes(head[:8], "little")
    if 2 <= size < 100 << 20 and head[8:10] == b'{"':
        return "safetensors", _ARRAYS
    return None


def _wide(head: bytes) -> tuple[str, str] | None:
    """UTF-16 without its mark: every second byte of Latin letters is zero."""
    if len(head) >= 2 * _LEAST:
        zeros = [head[i::2].count(0) / len(head[i::2]) for i in (0, 1)]
        if max(zeros) > 0.6 and min(zeros) < 0.1:
            return "UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"
    return None


def _ended(name: str) -> tuple[str, str]:
    """What a name ends in; nothing for one of text."""
    ending = "." + name.partition("?")[0].lower().rpartition("/")[2].rpartition(".")[2]
    for endings, found in _ENDINGS.items():
        if ending in endings.split():
            return found[0] + f", by its ending {ending}", found[1]
    return "", ""
