"""What ends a run early or on purpose: signals, hangs, injected faults."""
