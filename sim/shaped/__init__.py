"""Real processes as if they were far apart: shaped paths, stretched compute, faults."""
