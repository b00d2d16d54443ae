"""Conclusions from the tables: the verdict, causes, caveats, forecasts."""
