"""What scripts/bench_apply.py measures with: hosts here, ways to them that take time, contestants."""
