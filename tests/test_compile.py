"""All kernels compile for Hopper and Blackwell without a GPU: `tests.compile`."""

import re

import pytest

from tests.support.processes import python


@pytest.mark.parametrize("arch", ["90", "100"])
def test_each_kernel_compiles(tmp_path, arch):
    words = "-W", "ignore", "-m", "tests.compile", arch, "--once"
    printed = python(*words, TRITON_CACHE_DIR=str(tmp_path))
    sizes = dict(re.findall(r"(\w+\.\w+_kernel) (\d+)", printed))
    assert len(sizes) == 24 and all(int(size) > 1000 for size in sizes.values())
