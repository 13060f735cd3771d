"""Blobs that a peer fetches, keeps and gives to others of its run, and the weights that are read
from them."""
