"""Planning in processes of its own, and what passes between them and who asks."""
