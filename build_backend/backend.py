"""setuptools.build_meta, with zig (ziglang on PyPI) where the machine has no C compiler."""

import os
import platform
import shlex
import shutil
import sysconfig
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no compiler)


def compiler():
    """Return the C compiler of this machine; none if it has none, or is to do without it."""
    if os.environ.get("MPIMESH_BUILD_ZIG"):
        return None
    names = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    return next((name for name in names if name and shutil.which(shlex.split(name)[0])), None)


def set_compiler():
    """Choose the compiler for setuptools, before it first reads its flags."""
    variables = sysconfig.get_config_vars()
    found = compiler()
    if found:
        if found != variables["CC"]:  # that one built this Python, and may not be here
            os.environ["CC"] = found
        return
    try:
        import ziglang
    except ImportError:
        raise SystemExit(
            "There is no C compiler: install one, or ziglang with pip, or build with isolation"
        ) from None
    zig = shlex.quote(str(Path(ziglang.__file__).with_name("zig")))
    # With no target zig compiles for the CPU and the C library of this machine alone.
    libc = "gnu.2.17" if platform.libc_ver()[0] == "glibc" else "musl"
    cc = f"{zig} cc -target {platform.machine()}-linux-{libc}"
    # All flags anew: those of the compiler that built this Python are not all zig's, too.
    flags = {
        "CC": cc,
        "LDSHARED": f"{cc} -shared -s",
        "AR": f"{zig} ar",
        # Debian's Python.h asks for a header of /usr/include; zig's own come first.
        "CFLAGS": "-O3 -DNDEBUG -fwrapv -Wall -g0 -idirafter /usr/include",
        "CCSHARED": "-fPIC",
        "LDFLAGS": "",
        "OPT": "",
    }
    variables.update(flags)  # the dictionary that setuptools reads
    for name in flags:
        os.environ.pop(name, None)
    # Its own place is in the home, which a build may not be able to write to.
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(Path("build/zig").resolve()))


def get_requires_for_build_wheel(config_settings=None):
    """Return what is to be installed for a build: zig, too, where it is the compiler."""
    needs = build_meta.get_requires_for_build_wheel(config_settings)
    return needs if compiler() else [*needs, "ziglang>=0.13"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build a wheel."""
    set_compiler()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


get_requires_for_build_editable = get_requires_for_build_wheel


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build what an editable installation is made of."""
    set_compiler()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
