"""Choosing the capacity: what routers ask for, what a factor would drop of it, what that costs.

`trace` is what was asked for: recorded (`recorder`), read (`trace_file`, `megatron_jsonl`) or made
(`synthetic`). `whatif` replays it at any factor, `floor` says what even a perfect router drops.

`cost` counts bytes and FLOPs, `calibration` makes milliseconds of them; `recommend` finds the
smallest factor that keeps a promise, on the statistics of `quantile`. `study` does all of it once;
`settings`, `tables`, `plots` and `report` show it, and `command` is `padded-dispatch tune`.
`convert` knows what others mean by a capacity factor. Nothing here knows Megatron.
"""
