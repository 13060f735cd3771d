"""Graphs made from graphs: the eval form, lowering to core ATen, mixed precision, the vocabulary
head in blocks, and a model without some of its blocks."""
