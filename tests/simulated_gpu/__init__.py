"""A simulated NVIDIA GPU under the CUDA build of torch, and the tests that run on it. ``README.md`` says what it is."""
