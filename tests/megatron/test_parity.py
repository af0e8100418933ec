"""The rule of parity with stock can fail; what it is applied to is in `tests.gpu.table`."""

import torch

from tests.support.parity import Errors, compare


def _compared(ours: float) -> Errors:
    """Compare `ours` with stock, which is off by 0.25 where the exact value is 5."""
    values = {"ours": ours, "stock": 5.25, "exact": 5.0}
    found = {who: {"x": torch.tensor([1.0, value])} for who, value in values.items()}
    return compare(**found, dtype=torch.float32)["x"]


def test_the_rule_can_fail(pool2):
    ulp_of_5 = 2.0**-21
    for ours in (5.0, 5.5, 4.5, 5.5 + ulp_of_5):
        assert all(errors.passed for errors in pool2.run(_compared, ours))
    for ours in (5.5 + 2 * ulp_of_5, 4.49, torch.nan, torch.inf):
        assert not any(errors.passed for errors in pool2.run(_compared, ours))
