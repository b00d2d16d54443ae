"""What the tables say: forecasts, breakdowns, the step-time model."""
