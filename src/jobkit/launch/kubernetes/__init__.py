"""Runs of a plan as Jobs of Kubernetes, and a check of such manifests."""
