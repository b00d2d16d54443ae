"""Recomputes a scaling table that somebody published."""
