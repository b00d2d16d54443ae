"""Speed-up, efficiency, intervals and fits: numbers only."""

MIN_EFFICIENCY = 0.8  # parallel, of the size that is requested
