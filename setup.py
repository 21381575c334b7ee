"""The compiled part, for a Python that is not too old; all else stands in pyproject.toml."""

import sys

from setuptools import Extension, setup

# At once: some versions of pip search for minutes instead, and find nothing.
if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("mpimesh needs Python 3.11 or newer, and this is " + version + " of " + sys.executable)

from Cython.Build import cythonize

# No contraction: a result would have other bits where the CPU has a fused multiply-add.
FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden"]

setup(
    ext_modules=cythonize(
        [
            Extension(
                "mpimesh.core.node",
                ["mpimesh/core/node.pyx"],
                depends=["mpimesh/core/node.h", "mpimesh/core/kernels.h"],
                include_dirs=["mpimesh/core"],
                extra_compile_args=FLAGS,
            )
        ],
        compiler_directives={"language_level": 3},
    )
)
