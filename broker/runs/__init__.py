"""Runs and their replicas: what they do about what happens to them."""
