"""Processes: how they start and stop, their devices, and the (pipe, data, tensor) grid."""
