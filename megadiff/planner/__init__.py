"""Predicts what a layout costs: memory of every rank and bytes between ranks, in closed form and without a GPU."""
