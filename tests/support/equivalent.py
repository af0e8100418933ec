"""Changes of `tests.mutate` that nothing can notice, by module, each with the reason."""

EQUIVALENT: dict[str, dict[str, str]] = {
    "ops/rows.py": {
        "token_of_slot = torch.full((num_slots + 1,), -1, device=tokens_TD.device) -> "
        "token_of_slot = torch.full((num_slots + 1,), -2, device=tokens_TD.device)": (
            "any negative number is no token"
        ),
        "return torch.where(x_MP < num_shared, p_MP + shift_MP, -1) -> "
        "return torch.where(x_MP < num_shared, p_MP + shift_MP, -2)": (
            "any negative number is no row"
        ),
    },
    "exchange/agreement.py": {
        "layer = -1 if self.layer is None else self.layer -> "
        "layer = -2 if self.layer is None else self.layer": "layers have no negative numbers",
        "first, second = (int.from_bytes(half, signed=True) for half in (digest[:8], digest[8:])) "
        "-> first, second = (int.from_bytes(half, signed=True) for half in "
        "(digest[:8], digest[9:]))": "120 bits of a hash tell values apart as 128 do",
    },
    "exchange/mirror.py": {
        "if not absent or time.monotonic() >= end: -> if not absent or time.monotonic() > end:": (
            "a clock with nanoseconds; and at the very end one look more"
        ),
        "left = max(0.001, deadline - time.monotonic()) -> "
        "left = max(0.002, deadline - time.monotonic())": "a millisecond more after the limit",
        "name = blake2b(json.dumps(sorted(found)).encode(), digest_size=8).hexdigest() -> "
        "name = blake2b(json.dumps(sorted(found)).encode(), digest_size=9).hexdigest()": (
            "a name that is a byte longer, on all ranks"
        ),
    },
    "exchange/fit.py": {
        "if group is not None and group.size() > 1: -> "
        "if group is not None and group.size() >= 1:": (
            "the largest number of one rank is its own"
        ),
        "num_rounds = math.ceil(asked_TE.shape[0] / length) -> "
        "num_rounds = math.ceil(asked_TE.shape[0] * length)": (
            "more rounds, without any token, ask for no row: the largest demand stays"
        ),
        "rows_TG = torch.nn.functional.pad(rows_TG, (0, 0, 0, missing)) -> "
        "rows_TG = torch.nn.functional.pad(rows_TG, (0, 1, 0, missing))": (
            "one more pool, for which no row asks: the largest demand stays"
        ),
    },
    "tune/convert.py": {
        "if meaning == 'stash' and value < 0: -> if meaning == 'stash' and value <= 0:": (
            "0 has been refused by then"
        ),
    },
    "tune/cost.py": {
        "log_ratios = math.log(mean_rows) - np.log(np.arange(1, most + 1)) -> "
        "log_ratios = math.log(mean_rows) - np.log(np.arange(1, most - 1))": (
            "the last terms of the sum are far below its rounding"
        ),
    },
    "tune/recommend.py": {
        "rises = bool(phases) and factor > phases[-1].factor -> "
        "rises = bool(phases) and factor >= phases[-1].factor": (
            "a part that needs as much as the phase before it is part of that phase"
        ),
    },
    "tune/replay.py": {
        "_MAX_GROUPS = 2 ** 16 -> _MAX_GROUPS = 2 * 16": (
            "fewer records at a time, with the same result"
        ),
        "demand = demand.reshape(num_units, -1, *by_rank).sum(3) -> "
        "demand = demand.reshape(num_units, 1, *by_rank).sum(3)": (
            "a unit has one source by then: its only one, or the sum of all"
        ),
    },
    "tune/stationarity.py": {
        "power = np.random.default_rng(0).normal(size=(_DRAWS, num_waves)) ** 2 -> "
        "power = np.random.default_rng(1).normal(size=(_DRAWS, num_waves)) ** 2": (
            "other draws of the same distribution"
        ),
    },
    "tune/target.py": {
        "if 0 < hundredths < _LEAST_PERCENT: -> if 0 < hundredths <= _LEAST_PERCENT:": (
            "no floating-point number times 100 is this one"
        ),
        "if hundredths > 99: -> if hundredths >= 99:": "99 rounded down is 99",
    },
}
