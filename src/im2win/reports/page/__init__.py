"""One self-contained HTML page from tuning records and result files."""
