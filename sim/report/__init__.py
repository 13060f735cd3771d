"""What a simulated run came to: a summary, its text, and a page with pictures."""

from .summary import Summary, to_json, unigram_entropy, write_json
from .text import MOST_LINKS, render
from .write import measured_summary, write_report

__all__ = [
    "MOST_LINKS",
    "Summary",
    "measured_summary",
    "render",
    "to_json",
    "unigram_entropy",
    "write_json",
    "write_report",
]
