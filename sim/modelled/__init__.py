"""Scenarios under virtual time: from the file to the finished run, worlds drawn from seeds, and
shorter reruns of what failed."""
