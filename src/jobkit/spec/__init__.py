"""What one training is, and the plan of a study: settings, their checks, their expansion."""
