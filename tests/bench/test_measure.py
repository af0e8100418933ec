"""Cases that differ only in contender share their batches; sustained time and energy."""

from types import SimpleNamespace

import torch

from padded_dispatch.bench import measure
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.bench.measure import batches


def test_cases_of_one_layer_and_routing_share_their_batches():
    def drawn(**changes):
        sizes = {"num_tokens": 7, "skew": "hot", "seed": 3} | changes
        return batches(MODELS["tiny"], **sizes, dtype=torch.float32, device=torch.device("cpu"))

    first = drawn()
    assert drawn() is first
    assert drawn(num_tokens=8)[0].tokens.shape == (8, 1, 32)
    again = drawn()
    assert again is not first
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logits, other.logits)


def test_the_version_of_cublas_is_the_loaded_library_s(monkeypatch):
    def version():
        return 130602

    loaded = []
    library = SimpleNamespace(cublasLtGetVersion=version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(measure.ctypes, "CDLL", lambda name: loaded.append(name) or library)
    assert measure.cublas(torch.device("cuda", 0)) == "13.6.2"
    assert loaded == ["libcublasLt.so.13"]
    assert measure.cublas(torch.device("cpu")) is None


def test_sustained_time_and_energy_are_those_of_the_second_second(monkeypatch):
    """A clock that only `run` moves: 100 ms at first, 125 ms and 50 J from the eleventh run on."""
    runs, rests = [], []

    def seconds() -> float:
        return 0.1 * min(len(runs), 10) + 0.125 * max(len(runs) - 10, 0)

    def energy(handle, answer) -> int:
        answer._obj.value = 50_000 * len(runs)  # mJ
        return 0

    def clock(handle, kind, answer) -> int:
        answer._obj.value = 1980 - len(runs)
        return int(kind != 1)

    library = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=energy, nvmlDeviceGetClockInfo=clock
    )
    monkeypatch.setattr(measure, "_nvml", lambda index: (library, "a handle"))
    monkeypatch.setattr(measure, "_meet", lambda device: None)
    monkeypatch.setattr(measure, "_synchronize", lambda device: None)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=seconds, sleep=rests.append))
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda given, device: tensor(given))
    reduced = []
    monkeypatch.setattr(measure.dist, "all_reduce", lambda tensor, op: reduced.append(op))
    gpu = torch.device("cuda", 0)
    found = measure.timed(runs.append, iterations=1, device=gpu)
    assert found.samples_ms == [100] * 5 and found.sm_mhz == [1974, 1973, 1972, 1971, 1970]
    # Twice ten runs: a second at 100 ms each.
    assert len(runs) == 5 + 5 + 20 and runs[-10:] == list(range(10))
    assert (found.sustained_ms, found.joules) == (125, 50)
    assert rests == [0.5] * 5
    of_all_ranks = list(reduced)
    monkeypatch.setattr(measure, "_nvml", lambda index: None)
    found = measure.timed(runs.append, iterations=1, device=gpu)
    assert (found.sustained_ms, found.joules, found.sm_mhz) == (125, None, None)
    assert reduced == 2 * of_all_ranks  # Other ranks may have the library.
