"""One rank's exchange against the reference; `test_alltoall` has the cases."""

import pytest

from padded_dispatch.exchange.local import LocalExchange
from tests.exchange.test_alltoall import (
    ROUTINGS,
    _there_and_back,
    assert_is_reference,
    exchange_of,
    make_case,
)
from tests.support.grids import grid


@pytest.mark.parametrize("layout", ["packed", "rank"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_it_is_the_reference(routing, layout):
    case = make_case(routing, 1, 1, layout)
    assert type(exchange_of(grid(1, 1), case.config, packed=True)) is LocalExchange
    assert_is_reference(case, _there_and_back([case]))
