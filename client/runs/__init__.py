"""A run as its submitter has it: submitted, followed, evaluated, continued, its checkpoints and
weights brought home."""
