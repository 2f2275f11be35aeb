"""Builds a run on any layout and trains it: one interface whatever the degrees of parallelism are."""
