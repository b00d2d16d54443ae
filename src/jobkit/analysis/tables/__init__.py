"""The tables that a collect writes: their columns, series and files."""
