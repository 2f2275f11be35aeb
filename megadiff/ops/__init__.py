"""One file a fused operator: its plain reference, where it can run, and one entry point."""
