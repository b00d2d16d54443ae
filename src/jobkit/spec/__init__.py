"""What one training is, and the plan of a study: settings, their checks, their expansion."""

from jobkit.spec.plan import Plan, Study
from jobkit.spec.runspec import RunSpec

__all__ = ["Plan", "RunSpec", "Study"]
