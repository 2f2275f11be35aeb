"""Predicts what a layout costs, in closed form: the memory of every rank and the bytes between ranks."""
