"""Custom ops of the dispatcher, one idea a module; `kernels` has their Triton kernels.

An op has four parts, in one module: its body in plain torch, which runs on CPUs and is the
specification; the Triton kernel that runs on CUDA devices and must give the same result; a fake
that returns empty tensors of the right shapes, for `torch.compile`; and its backward, if it has
one. Callers use the plain functions at the top of a module; the ops are below them.

The modules, in the order of a token's way:

select: cut the routing map to the rows for which a pool has slots, by policy
plan: give every kept row its slot
rows: move rows between tokens, slots and packed rows
grouped: the linears of all experts over packed rows
activation: what lies between an expert's two linears
counters: count what was asked for, kept and lost, on the device; figures of that on the host
"""
