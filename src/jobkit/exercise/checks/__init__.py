"""Checks of the learner's files: what two ranks did with it, and what is wrong with that."""
