"""The report of a profile as a page: one HTML file with inline SVG, no script, nothing loaded."""
