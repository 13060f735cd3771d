"""Which codec each link and role of a plan gets, and why."""

__all__ = [
    "adatopk",
    "carried",
    "carried_rows",
    "codec_reasons",
    "codec_table",
    "codecs",
]
