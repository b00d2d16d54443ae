"""Latency and bandwidth of the collectives."""
