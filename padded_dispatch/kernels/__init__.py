"""Triton kernels and their launchers: tensors and ints in, tensors out.

They need Triton, which comes with torch's CUDA builds. Their ops import them at the first CUDA
tensor. With TRITON_INTERPRET=1 they run on a CPU, which is how their logic is tested. Every module
has the kernels of the `ops` module of the same name; `gemm` has the products of `ops.grouped`, and
`direct` the kernels of `exchange.direct`.
"""

# Rows of a tile of a grouped product, and the most tiles of one expert that are computed before the
# next columns of a large weight are: see `gemm`. Shared with ops, as what follows.
ROWS_OF_TILE = 128
TILES_OF_GROUP = 16

# What `counters` counts, one number each, in the order in which they lie behind the numbers per
# expert: see `ops.counters.Counters`. Listed here because kernels and ops share the order, and ops
# must not need Triton.
SCALARS = (
    "asked_mass",
    "dropped_mass",
    "num_tokens",
    "lost_tokens",
    "num_positions",
    "num_passes",
    "num_slots",
    "num_unplaced",
    "idle_passes",
)
