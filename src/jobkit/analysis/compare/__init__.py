"""Compares two studies size by size."""
