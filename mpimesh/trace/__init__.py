"""Events and their times: the ring that keeps them, and the pictures made of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
