"""What a user's own training program needs to be measured: the meter, the hook, adapters."""
