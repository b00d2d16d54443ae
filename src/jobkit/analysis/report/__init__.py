"""The report, the summary and the tables for a proposal."""
