"""The study's microbenchmarks: matrix products during all-reduces, and collectives by size."""
