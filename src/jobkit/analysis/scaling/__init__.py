"""Speed-up, efficiency, intervals and fits: numbers only."""
