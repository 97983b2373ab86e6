"""What `benchmarks/accumulation.py` runs: models, ways to accumulate their gradients, counts, turns and the figure."""
