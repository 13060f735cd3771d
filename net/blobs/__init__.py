"""Blobs on the wire: their pieces, the client of `Broker.Blobs`, and one blob from several holders
at once."""
