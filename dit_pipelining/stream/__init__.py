"""Stream batch: causal models that make video chunk after chunk, with all noise levels in flight."""
