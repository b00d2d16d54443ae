"""How far the runs of a study are."""
