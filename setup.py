"""Refuse an old Python at once: some versions of pip search for minutes instead, and find nothing.

All else stands in pyproject.toml.
"""

import sys

from setuptools import setup

if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("mpimesh needs Python 3.11 or newer, and this is " + version + " of " + sys.executable)

setup()
