"""Runs a program on a rehearsed machine, in a process forked from one that has imported torch."""

import faulthandler
import sys
import tempfile

import sitecustomize

sitecustomize.begin()
faulthandler.enable()
tempfile.tempdir = None  # what was imported may have asked where temporary files go
sys.path[0] = ""  # as for `python -c`
_, program, *words = sys.argv
sys.argv = ["-c", *words]
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
