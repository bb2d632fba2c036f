"""The steps of ``benchmarks/gpu.py``, and what runs them."""
