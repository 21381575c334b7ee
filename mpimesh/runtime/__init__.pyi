from .device_mesh import DeviceMesh as DeviceMesh
from .group import ProcessGroup as ProcessGroup
from .launch import Launch as Launch
from .messages import MAX_TAG as MAX_TAG
from .system import (
    initialize_accelerator_system as initialize_accelerator_system,
)
from .system import (
    initialize_multi_client as initialize_multi_client,
)
from .system import (
    shutdown_accelerator_system as shutdown_accelerator_system,
)
from .traffic import Traffic as Traffic
from .work import CollectiveTensor as CollectiveTensor
from .world import exit_all as exit_all
from .world import run_virtual as run_virtual

__all__: list[str]
