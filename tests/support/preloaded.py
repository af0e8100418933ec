"""What the process imports that workers are forked from; see `forks`."""

import gc
import importlib
import warnings

_MODULES = "hypothesis", "padded_dispatch.bench.work", "padded_dispatch.train.loop", "pytest"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core says which optional packages it does without.
    for name in _MODULES:
        importlib.import_module(name)
# Runs of a worker end with a collection, which would pass over all of it: 0.2 s each.
gc.freeze()
