"""Layouts of arrays on meshes, and ways from one layout to another: values and arithmetic."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
