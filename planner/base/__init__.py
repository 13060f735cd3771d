"""What a planner gets and gives, and numbers that are the same on every processor."""
