"""Numbers with their units, as people read them: three digits, never in powers of ten."""

from __future__ import annotations

from ...net.printable import printable as plain

__all__ = ["bit_rate", "cut", "figure", "percent", "plain", "seconds", "size", "start", "thousands"]


def figure(x: float) -> str:
    """Three digits; thousands and more with a letter."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(x) < 999.5:
            return f"{x:.3g}{unit}" if abs(x) >= 0.001 or x == 0 else f"{x:.1e}"
        x /= 1000
    return f"{x:.3g}P"


def thousands(n: float) -> str:
    """Three digits and a letter, below a thousand without one."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"


def seconds(t: float) -> str:
    if t == 0 or abs(t) >= 1:
        if abs(t) < 600:
            return f"{t:.3g} s"
        return f"{t / 60:.3g} min" if abs(t) < 3 * 3600 else f"{t / 3600:.3g} h"
    return f"{t * 1e3:.3g} ms" if abs(t) >= 1e-3 else f"{t * 1e6:.3g} µs"


def size(size_bytes: float) -> str:
    """Bytes, in powers of 1000."""
    return _scaled(size_bytes, "B", "kB", "MB", "GB", "TB", "PB")


def bit_rate(bytes_per_s: float) -> str:
    """As links are sold: bits per second."""
    return _scaled(8 * bytes_per_s, "bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def _scaled(x: float, *units: str) -> str:
    """In the first unit, each 1000 of the one before, that leaves three digits."""
    for unit in units[:-1]:
        if abs(x) < 999.5:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} {units[-1]}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def cut(text: str, most: int) -> str:
    """At most so many characters; the middle goes, since names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def start(text: str, most: int) -> str:
    """At most so many characters, the first ones."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
