"""Probes: each runs a small experiment on this machine and returns tables of what it measured."""
