"""Conclusions from the tables: forecasts, breakdowns, the step-time model."""
