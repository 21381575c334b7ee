"""The compiled part, for a Python that is not too old; all else stands in pyproject.toml."""

import os
import platform
import runpy
import sys
from pathlib import Path

# At once: some versions of pip search for minutes instead, and find nothing.
if sys.version_info < (3, 11):  # noqa: UP036
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("mpimesh needs Python 3.11 or newer, and this is " + version + " of " + sys.executable)

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
BUILT = runpy.run_path(str(ROOT / "mpimesh" / "core" / "built.py"))

# No contraction: a result would have other bits where the CPU has a fused multiply-add.
# Unused functions: a module takes what it needs of the headers, whose functions are static.
FLAGS = ["-ffp-contract=off", "-fvisibility=hidden", "-Wno-unused-function"]
if not {"-O0", "-O1", "-Og"} & set(os.environ.get("CFLAGS", "").split()):  # as debuggers want it
    FLAGS.append("-O3")
OPTIONS = ["CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "MPIMESH_BUILD_ZIG"]


class BuildCore(build_ext):
    """Compiles what does not stand beside the sources already, whatever the times of files say."""

    def initialize_options(self):
        super().initialize_options()
        self.cython_c_in_temp = True

    def run(self):
        options = [f"{name}={os.environ[name]}" for name in OPTIONS if os.environ.get(name)]
        # The C library, as a checkout may be copied into a container that has an older one.
        self.note = " ".join([BUILT["digest"](), "".join(platform.libc_ver()), *options])
        built = all(Path(self.in_place(ext)).is_file() for ext in self.extensions)
        self.fresh = built and self.note == BUILT["note"]() and not self.force
        self.force = True
        if not self.fresh:
            runpy.run_path(str(ROOT / "build_backend" / "headers.py"))
        super().run()

    def build_extension(self, ext):
        if self.fresh:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(self.in_place(ext), str(target))
        else:
            import numpy  # not for a source distribution

            ext.include_dirs.append(numpy.get_include())
            super().build_extension(ext)

    def copy_extensions_to_source(self):
        if not self.fresh:
            super().copy_extensions_to_source()
            Path(BUILT["NOTE"]).write_text(self.note)

    def in_place(self, ext):
        return self._get_inplace_equivalent(self.get_finalized_command("build_py"), ext)[0]


setup(
    cmdclass={"build_ext": BuildCore},
    ext_modules=[
        Extension(
            f"mpimesh.core.{name}",
            [f"mpimesh/core/{name}.pyx"],
            include_dirs=["mpimesh/core"],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=FLAGS,
        )
        for name in ("node", "mail", "call", "pool", "dispatch")
    ],
)
