"""Byte ranges of files on the web, the places that an owner allows, and the way out through a
proxy."""
