"""Stop where Python was installed without its headers, with the names of their packages."""

import os
import sys
import sysconfig
from pathlib import Path

header = Path(sysconfig.get_path("include"), "Python.h")
elsewhere = any(os.environ.get(name) for name in ("CPATH", "C_INCLUDE_PATH", "CFLAGS"))
if not elsewhere and not header.is_file():
    sys.exit(
        f"{header} is missing: install python3-dev (Debian, Ubuntu) or python3-devel (Fedora, "
        f"RHEL) for Python {sys.version_info[0]}.{sys.version_info[1]}"
    )
