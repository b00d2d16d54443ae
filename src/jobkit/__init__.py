"""jobkit measures how a training job scales on a cluster, and tells the truth about it."""

__version__ = "0.1.0"
