"""Check that the compiled modules beside this file were built from the sources beside it.

Times of files do not say it: git sets them to now, a copy may keep them. The build leaves a note,
with the checksum of what it read. An installed package has no sources, and nothing is compared.
No pathlib: to import it takes longer than the check.
"""

import os
from binascii import crc32
from importlib.machinery import EXTENSION_SUFFIXES

FOLDER = os.path.dirname(os.path.abspath(__file__))
SUFFIX = EXTENSION_SUFFIXES[0]
NOTE = os.path.join(FOLDER, "built" + SUFFIX.replace(".so", ".txt"))


def digest() -> str:
    """Return the checksum of all that a build of the modules reads; empty without the sources."""
    sources = [name for name in os.listdir(FOLDER) if name.endswith((".pyx", ".pxd", ".pxi", ".h"))]
    beside = [f"../../{name}" for name in ("setup.py", "build_backend/backend.py")]
    if not sources or not os.path.isfile(os.path.join(FOLDER, beside[0])):
        return ""
    total = 0
    for name in [*beside, *sorted(sources)]:
        with open(os.path.join(FOLDER, name), "rb") as file:
            total = crc32(file.read(), crc32(name.encode(), total))
    return f"{total:08x}"


def note() -> str:
    """Return what the last build in place has noted: the digest of its sources, and its options."""
    try:
        with open(NOTE) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def check() -> None:
    """Refuse to go on with modules that are missing, or built from other sources than these.

    Raises:
        ImportError: If they are.
    """
    now = digest()
    if not any(name.endswith(SUFFIX) for name in os.listdir(FOLDER)):
        state = "not built"
    elif now and now != note().partition(" ")[0]:
        state = "older than its sources"
    else:
        return
    raise ImportError(
        f"what is compiled of mpimesh is {state} for {SUFFIX[1:-3]} in {FOLDER}: build it by make, "
        "or by pip install --no-deps --config-settings editable_mode=compat --editable ."
    )
