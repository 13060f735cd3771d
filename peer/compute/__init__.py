"""What a peer does with tensors: building stages, running their actions, codecs of its frames,
snapshots of its state."""
