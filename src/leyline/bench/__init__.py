"""Measurements: each module has a `run` that returns rows; the command line prints them."""
