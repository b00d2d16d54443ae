"""jobkit measures how a training job scales on a cluster, and why not better."""

__version__ = "0.1.0"
