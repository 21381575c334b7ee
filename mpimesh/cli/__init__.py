"""The command line: ``mpimesh``, or ``python -m mpimesh``."""

from mpimesh.cli.app import app

__all__ = ["app"]
