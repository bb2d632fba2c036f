"""The study's microbenchmarks: matrix products beside all-reduces, and collectives by size."""
