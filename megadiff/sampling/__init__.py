"""Solvers, guidance and pictures: noise to images with a `predict` function, whatever the network."""
