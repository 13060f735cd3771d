"""From the [model] of a job to a module, with or without its weights."""
