"""Rules of operations on split arrays: pure functions of shapes and placements."""
