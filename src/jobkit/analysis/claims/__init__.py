"""Recomputes a published scaling table."""
