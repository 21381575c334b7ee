"""``python -m mpimesh``."""

from mpimesh.cli import app

# Completion is for the command, not for python.
app(prog_name="mpimesh")
