"""The live part: the world of ranks, meshes, groups, and results to come."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
