"""Runs of a plan as manifests for Kubernetes, and checks of such manifests."""
