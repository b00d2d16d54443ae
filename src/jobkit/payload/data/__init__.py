"""Images, their cache, and the batches of a rank."""
