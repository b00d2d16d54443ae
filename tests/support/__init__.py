"""What tests share: places, made-up studies, launched ranks, checkouts."""
