"""Where the time of an iteration goes: breakdown and traces."""
