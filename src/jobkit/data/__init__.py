"""Images: their sources, and the prepared file that ranks map."""
