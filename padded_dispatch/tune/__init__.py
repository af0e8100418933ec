"""Choose a capacity factor from the routing of a training run: `padded-dispatch tune`.

replay          replays counts at any factor, exactly: cells, and the store
cost            bytes of a factor; the drop of a perfectly balanced router
recommend       the smallest factor that keeps a target; a study of one trace
report          the text for the terminal, with settings to paste
command         the command line

Nothing here imports torch or Megatron; `padded_dispatch.trace` is the format of a trace.
"""
