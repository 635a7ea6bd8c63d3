"""What others use today, as one small program each; ``benchmarks.heterogeneous`` starts them, a process a rank."""
