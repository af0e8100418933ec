"""All kernels compile for Hopper without a GPU; `tests.compile` does it for other GPUs."""

import re
import subprocess
import sys

from tests.support.processes import ENVIRONMENT


def test_each_kernel_compiles_for_hopper(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.compile", "90", "--once"],
        env=ENVIRONMENT | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(re.findall(r"(\w+\.\w+_kernel) (\d+)", done.stdout))
    assert len(sizes) == 22 and all(int(size) > 1000 for size in sizes.values())
