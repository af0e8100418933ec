"""Choose a capacity factor from the routing of a training run: `padded-dispatch tune`.

demand          counts the rows that a trace asks for
replay          replays counts at any factor, exactly: cells, and the store; bytes of a factor
recommend       the smallest factor that costs little; a study of one trace
plan            memory of a rank, before a run and without a trace
plots           figures of a study
report          the text for the terminal, the page, and settings to paste
command         the command line

Nothing here imports torch or Megatron; `padded_dispatch.trace` is the format of a trace.
"""
