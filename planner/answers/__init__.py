"""Carrying out requests: plans, replicas, comparisons and previews; which plans are of no use."""
