"""Checks an allocation before a job uses it."""
