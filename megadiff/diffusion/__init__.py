"""Schedules, predictions, loss weights, objective and randomness: knows no network and no ranks."""
