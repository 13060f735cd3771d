"""What a simulated run came to: a summary, its text, and a page with pictures."""

from .summary import Summary, unigram_entropy, write_json
from .text import MOST_LINKS, render

__all__ = ["MOST_LINKS", "Summary", "render", "unigram_entropy", "write_json"]
