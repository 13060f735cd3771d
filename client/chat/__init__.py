"""What was said or written, chats, instructions and text, on the way to samples of token ids."""
