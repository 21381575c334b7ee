"""The members of the largest classes by task: the order of their pages in the reference."""

from __future__ import annotations

import inspect
from functools import cached_property

import mpimesh as mm

TASKS: dict[type, dict[str, str]] = {
    mm.DeviceMesh: {
        "Ranks and coordinates": """rank world_size coord coord_of coords_of rank_of rank_at
            neighbour offset_of place_in_group set_rank""",
        "Dims": """mesh name dims dim_names dim_size contains_dim contains_rank shape ndim
            size strides ids dims_text topology""",
        "Groups": """group get_group group_names in_group group_rank add_group groups num_groups
            group_index group_ranks""",
        "All ranks together": "barrier sync_collective",
        "Memory and devices": """shared_empty use_device local_rank hosts get_device local_device
            all_devices devices_by_backend devices_in_group total_memory_mb total_compute_units""",
        "What has moved, and how fast": "traffic budget links measure_links",
        "Other meshes, closing": "copy reshape comm set_comm close closed",
    },
    mm.ProcessGroup: {
        "Collectives": """all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather
            scatter barrier start_barrier""",
        "Planned once, started many times": """all_reduce_init all_gather_init reduce_scatter_init
            all_to_all_init broadcast_init reduce_init gather_init scatter_init send_init
            recv_init""",
        "Messages": "send recv shift send_next send_prev recv_next recv_prev",
        "Memory and algorithms": "empty_once algorithms alone",
        "Ranks, communicator, closing": "group_rank_of communicator close closed",
    },
    mm.DTensor: {
        "The whole array": "shape ndim size dtype itemsize nbytes layout placement mesh device",
        "This rank's block": "local to_local global_offset is_member from_local",
        "Into another layout": """redistribute redistribute_init start_redistribute plan full
            full_tensor tolist item""",
        "Sums and other reductions": """sum mean prod min max argmin argmax any all std var trace
            cumsum cumprod dot""",
        "Shapes": "reshape ravel flatten transpose T mT swapaxes squeeze diagonal repeat",
        "Elements": """take compress nonzero sort argsort round clip conj conjugate real imag astype
            fill copy to_device""",
    },
    mm.DataParallel: {
        "A step": "train_step evaluate forward step num_microbatches zero_grad no_sync",
        "Parameters and their gradients": """parameters named_parameters gathered clip_grad_norm
            buckets rebuild_buckets tune_buckets""",
        "Where the time goes": "step_picture",
        "State": "state_dict full_state_dict load_state_dict check_replicas",
        "The model": """inner module into_inner mesh num_replicas set_training is_training train
            eval""",
    },
    mm.PipelineParallel: {
        "A step": "train_step evaluate forward step num_microbatches zero_grad no_sync",
        "Stages and schedule": "stage local_stages num_stages schedule partition",
        "Where the time goes": "step_report step_picture",
        "Parameters and their gradients": """parameters named_parameters gathered clip_grad_norm
            buckets rebuild_buckets tune_buckets""",
        "State": "state_dict full_state_dict load_state_dict check_replicas",
        "The model": "mesh set_training is_training train eval",
    },
}


def documented(owner: type) -> dict[str, str]:
    """Return the public members of a class that have a text, each with its directive."""
    directives = {}
    for name in dir(owner):
        member = inspect.getattr_static(owner, name)
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, (property, cached_property)):
            directives[name] = "autoproperty"
        elif callable(member) or isinstance(member, (classmethod, staticmethod)):
            directives[name] = "automethod"
    return directives


def by_task() -> dict[str, list[tuple[str, list[tuple[str, str]]]]]:
    """Return for each class the titles of its tasks, each with members and their directives."""
    pages = {}
    for owner, tasks in TASKS.items():
        directives = documented(owner)
        listed = [name for names in tasks.values() for name in names.split()]
        if sorted(listed) != sorted(directives):
            missing, unknown = set(directives) - set(listed), set(listed) - set(directives)
            raise ValueError(
                f"each public member of {owner.__name__} is in one task of {__file__}: add "
                f"{sorted(missing)}, remove {sorted(unknown)}, and no name twice"
            )
        pages[f"mpimesh.{owner.__name__}"] = [
            (title, [(name, directives[name]) for name in names.split()])
            for title, names in tasks.items()
        ]
    return pages
