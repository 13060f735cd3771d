"""Models that come with Shoal, each beside a job that trains it."""
