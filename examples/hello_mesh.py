"""All-reduce over one dim of a mesh: mpiexec -n 4 python examples/hello_mesh.py"""

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
