"""All kernels compile for Hopper and Blackwell without a GPU: `tests.compile`."""

import re
import subprocess
import sys

import pytest

from tests.support.processes import ENVIRONMENT


@pytest.mark.parametrize("arch", ["90", "100"])
def test_each_kernel_compiles(tmp_path, arch):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.compile", arch, "--once"],
        env=ENVIRONMENT | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(re.findall(r"(\w+\.\w+_kernel) (\d+)", done.stdout))
    assert len(sizes) == 22 and all(int(size) > 1000 for size in sizes.values())
