"""Checks of an allocation, of its communication, and of the strategies."""
