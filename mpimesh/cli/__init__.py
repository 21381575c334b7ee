"""``python -m mpimesh``: the command line."""

from mpimesh.cli.app import app

__all__ = ["app"]
