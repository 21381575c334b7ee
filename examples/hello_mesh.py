"""All-reduce over one dim of a mesh: mpiexec -n 4 python examples/hello_mesh.py

           pp=0      pp=1
    dp=0   rank 0 -> rank 1
             |         |       along dp ranks take the mean, along pp each hands on to the next
    dp=1   rank 2 -> rank 3

Each rank prints a line, in any order:

    rank 0 at dp=0, pp=0: mean over dp [1. 1. 1.], from the stage before None
    rank 1 at dp=0, pp=1: mean over dp [2. 2. 2.], from the stage before [0. 0. 0.]
    rank 2 at dp=1, pp=0: mean over dp [1. 1. 1.], from the stage before None
    rank 3 at dp=1, pp=1: mean over dp [2. 2. 2.], from the stage before [2. 2. 2.]
"""

import numpy as np

import mpimesh as mm


def main() -> None:
    with mm.DeviceMesh("dp=-1,pp=2") as mesh:
        gradient = np.full(3, float(mesh.rank))
        mean = mesh.group("dp").all_reduce(gradient, op="mean")  # starts, and returns at once
        neighbour = mesh.group("pp").shift(gradient, 1)  # one more under way
        print(
            f"rank {mesh.rank} at dp={mesh.coord('dp')}, pp={mesh.coord('pp')}: "
            f"mean over dp {mean.resolve()}, from the stage before {neighbour.resolve()}\n",
            end="",
        )


if __name__ == "__main__":
    main()
