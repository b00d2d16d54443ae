"""Checkpoints: written, listed, verified, loaded."""
