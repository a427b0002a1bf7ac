"""What a worker computes with: decisions in plain Python, computation in tensors."""
