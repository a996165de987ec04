"""What autoprec claims, measured: each folder of programs has one subject, the others hold data.

Run a program from the repository's root, as `python -m benchmarks.search.oracle`. `tasks/`,
`holdout/` and `islands/` hold task files, `curves/` recorded grids, `results/` what was measured.
"""
