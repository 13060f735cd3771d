"""Records of what was said, chats and instructions, on the way to samples of token ids."""
