"""How good the pictures are."""
