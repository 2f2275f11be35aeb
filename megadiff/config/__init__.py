"""Settings of a run. Nothing in this package imports torch or DeepSpeed, so a bad setting fails in
milliseconds."""
