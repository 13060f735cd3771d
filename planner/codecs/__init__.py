"""Which codec each link and role of a plan gets, and why."""
