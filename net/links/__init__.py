"""One link without I/O: frames, credits, what is sent and what came, over any number of
connections."""
