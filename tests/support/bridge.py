"""Run Megatron-Bridge's own `pretrain()` on a CPU: a case of `notebooks/bridge_run.py`, tiny.

torchrun --nproc-per-node 1 -m tests.support.bridge CASE FOLDER
"""

import importlib
import os
import sys
from pathlib import Path

from tests.support.fake_gpu import pretend


def main() -> None:
    name, folder = sys.argv[1:]
    os.environ.update(HF_HUB_CACHE=f"{folder}/hub", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))
    pretend()
    import bridge_run
    from bridge_stand_ins import importable

    with importable():
        from megatron.core.datasets import utils

        utils.compile_helpers = lambda: None  # A wheel has them compiled, and no Makefile.
        importlib.import_module("megatron.bridge.training.pretrain")
        for module in [m for n, m in sys.modules.items() if n.startswith("megatron.core")]:
            for has in ("HAVE_TE", "SplitAlongDim", "get_cpu_offload_context"):
                if hasattr(module, has):  # There is a stand-in alone.
                    setattr(module, has, None)
        from padded_dispatch.megatron import megatron_on_cpu

        sizes = bridge_run.Sizes(layers=2, seq_length=32, vocab=512, tiny=True)
        with megatron_on_cpu():
            bridge_run.work(name, sizes, Path(folder) / name)


if __name__ == "__main__":
    main()
