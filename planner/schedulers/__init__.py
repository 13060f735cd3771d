"""All planners by the name that a job gives them, and how a better plan is told from noise."""
