"""How the store behaves at scale: `python -m benchmarks.store`."""
