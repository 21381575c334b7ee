"""The ranks that share memory: what each has started, and the waits for it."""

cdef extern from "kernels.h":
    pass
cdef extern from "node.h":
    ctypedef struct NodeLane:
        pass
    ctypedef struct NodeDoor:
        pass

LANE_BYTES = sizeof(NodeLane)
DOOR_BYTES = sizeof(NodeDoor)
