"""Duties of every transport: functions that all ranks run, each with its own oracle.

`tests/virtual/contract/test_virtual.py` runs them on virtual ranks and
`tests/mpi/test_contract.py` under mpiexec.
"""
