"""Choosing the capacity: what routers ask for, what a factor would drop of it, what that costs.

`trace` is what was asked for: recorded (`recorder`), read (`trace_file`, `megatron_jsonl`) or made
(`synthetic`). `whatif` replays it at any factor, `floor` says what even a perfect router drops.
Nothing here knows Megatron.
"""
