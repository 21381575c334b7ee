"""``python -m mpimesh``."""

from mpimesh.cli import app

app()
