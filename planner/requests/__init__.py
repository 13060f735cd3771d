"""What planning is asked and answers, and what the spec of a run says of it."""
