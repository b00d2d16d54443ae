"""Shows the progress of a study's runs."""
