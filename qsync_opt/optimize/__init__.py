"""The allocation problem: its data, its formulation, its solvers and its oracle."""
