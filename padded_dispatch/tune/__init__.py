"""Choose a capacity factor from the routing of a training run: `padded-dispatch tune`.

trace           what routers asked for, in memory and on disk
recorder        records a trace during training, also under CUDA graphs
megatron_trace  reads the traces of Megatron-Core's own tracer
synthetic       makes traces of pure kinds
replay          replays a trace at any factor, exactly
cost            bytes and FLOPs of a factor; the drop of a perfectly balanced router
hosts           which exchange is fastest over how many hosts
time_model      milliseconds from bytes and FLOPs
warm_up         where a run has settled
quantile        confidence bounds on a quantile of steps
stationarity    whether a trace resembles itself
recommend       the smallest factor that keeps a target
study           all of it for one trace
convert         capacity factors of other dispatchers
plots           figures of a study
menu            the choices that a study leaves
table           tables of text
report          settings, tables and the HTML report of a study
command         the command line

Nothing here imports Megatron.
"""
