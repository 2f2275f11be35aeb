"""Solvers, guidance and pictures: turns noise into images with a `predict` function, knows no network class."""
