"""What one training is, and the plan of a study: settings, their checks, their expansion."""

from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study

__all__ = ["Plan", "RunSpec", "Study"]
