"""Custom ops of the dispatcher, one idea a module; `kernels` has a twin of each module.

An op has four parts, in one module: its body in plain torch, which runs on CPUs and is the
specification; the Triton kernel that runs on CUDA devices and must give the same result; a fake
that returns empty tensors of the right shapes, for `torch.compile`; and its backward, if it has
one. A module lets callers use plain functions and keeps the ops below them.

The modules, in the order of a token's way:

select: cut the routing map to at most C tokens per expert, by policy
overflow: `select_with_remedy`, the entry of selection: `select`, then what happens to dropped rows
plan: give every kept row its slot
rows: move rows between tokens, slots and packed rows
grouped: the linears of all experts over packed rows
activation: what lies between an expert's two linears
counters: count what was asked for, kept and lost, on the device
"""
