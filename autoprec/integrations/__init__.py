"""Other people's trainers, one file each, over one seam: a profile in a loop that they own.

`lightning`, `accelerate` and `transformers` each attach a profile completely or refuse. Importing
this package imports no trainer, and no framework.
"""
