"""Where the time of an iteration goes: what communication costs ddp, and traces."""
