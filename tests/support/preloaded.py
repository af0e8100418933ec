"""The imports of the process from which workers are forked; see `forks`."""

import gc
import importlib
import warnings

_MODULES = "hypothesis", "padded_dispatch.bench.command", "padded_dispatch.train.loop", "pytest"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns about missing optional packages.
    for name in _MODULES:
        importlib.import_module(name)
# Every run of a worker ends with a garbage collection. Freezing saves it 0.2 s each.
gc.freeze()
