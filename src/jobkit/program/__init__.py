"""What a user's own training program needs to be measured: the meter and the hook."""
