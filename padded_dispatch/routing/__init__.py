"""Routing, of one source by itself: the rows that it keeps, and their numbers.

select: cut the routing map to the rows for which cells have slots, by policy
plan: give every row a number among the source's rows for its expert

Plain torch runs on CPUs and is the specification; on CUDA tensors the kernels of the modules of the
same names in `kernels` run and give the same bits.
"""
