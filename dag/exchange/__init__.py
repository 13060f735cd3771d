"""Exchanges inside a step: what is exchanged, among whom, and the collectives that carry it out."""
