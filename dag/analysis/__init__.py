"""What a graph's operators tell of a model without running it: blocks that repeat, products with
weights, samples that stay apart, rows that tables lack, blocks that can be skipped, gradients of
weights that can wait."""
