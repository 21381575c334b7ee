"""Figures: what mpimesh takes beside what raw mpi4py takes, measured in turns in one run."""
