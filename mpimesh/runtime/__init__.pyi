from .device_mesh import DeviceMesh as DeviceMesh
from .group import Backend as Backend
from .group import ProcessGroup as ProcessGroup
from .launch import Launch as Launch
from .messages import MAX_TAG as MAX_TAG
from .traffic import Traffic as Traffic
from .work import CollectiveTensor as CollectiveTensor
from .world import exit_all as exit_all
from .world import run_virtual as run_virtual

__all__: list[str]
