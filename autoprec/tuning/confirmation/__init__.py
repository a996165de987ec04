"""Times the proven recipes against the baseline and chooses among them."""
