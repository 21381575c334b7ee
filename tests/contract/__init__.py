"""What every transport must do: functions that all ranks run, each with its own oracle.

`tests/pure/test_contract_virtual.py` runs them on virtual ranks and
`tests/ranks/test_contract.py` under mpiexec.
"""
