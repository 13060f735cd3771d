"""What is known of the links between peers, and who measures which one next."""
