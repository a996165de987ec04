"""Decides whether a precision trains like float32, from scalars and histograms alone."""
