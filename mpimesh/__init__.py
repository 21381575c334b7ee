"""mpimesh: a device mesh for MPI.

Named meshes of ranks, collectives with deferred results, and pipelines of stages, for
NumPy and CuPy, on any MPI. Importing this package starts no MPI, and loads little: each name is
imported when it is first used.
"""

import lazy_loader

from mpimesh.runtime.failure import install

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"

# Other ranks may wait for this process from now on: it must not fail without a word.
install()
del install
