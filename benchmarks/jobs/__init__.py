"""The job that ``benchmarks.heterogeneous`` measures."""
