"""Injects faults into a short training and measures what each costs."""
