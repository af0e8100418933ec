"""What ranks recorded comes together again, also after a run that was killed or resumed."""

import dataclasses
import io
import pickle
from pathlib import Path

import numpy as np
import pytest

from padded_dispatch.trace import Demand, load_trace, record_dtype
from tests.support.traces import equal, made_up, save

DEMAND = made_up(num_steps=6, num_layers=2, num_ranks=2, num_tokens=9, num_experts=4, top_k=2)
FIRST = "rank-00000-step-00000000.npy"


def part(demand: Demand, chosen: slice) -> Demand:
    return dataclasses.replace(demand, steps=demand.steps[chosen], counts=demand.counts[chosen])


def test_files_of_ranks_groups_and_stages_come_together(tmp_path):
    """Steps of two micro-batches each; a second group; layers in the files of two stages."""
    passes = dataclasses.replace(DEMAND, steps=np.array([3, 3, 4, 4, 9, 9]), pool="expert")
    save(passes, tmp_path / "a")
    found = load_trace([tmp_path / "a"])
    assert equal(found, passes) and (found.pool, found.num_left_out) == ("expert", 0)
    assert equal(load_trace(sorted((tmp_path / "a").iterdir(), reverse=True)), passes)
    other = dataclasses.replace(passes, counts=passes.counts[::-1])
    save(other, tmp_path / "b", group=1)
    both = load_trace([tmp_path / "a", tmp_path / "b"])
    assert both.steps.tolist() == [3, 3, 3, 3, 4, 4, 4, 4, 9, 9, 9, 9]
    for step in range(3):
        of_step = both.counts[4 * step : 4 * step + 4]
        here = slice(2 * step, 2 * step + 2)
        assert np.array_equal(of_step, np.concatenate([passes.counts[here], other.counts[here]]))
    for layer in (0, 1):
        one = slice(layer, layer + 1)
        stage = dataclasses.replace(passes, layers=passes.layers[one], counts=passes.counts[:, one])
        save(stage, tmp_path / "s")
        for file in (tmp_path / "s").glob("rank*.npy"):
            file.rename(tmp_path / "s" / f"stage-{layer}-{file.name}")
    assert equal(load_trace([tmp_path / "s"]), passes)


def test_a_killed_process_leaves_the_steps_before(tmp_path):
    """Cut anywhere; a step that one rank lacks is left out."""
    save(DEMAND, tmp_path)
    whole = (tmp_path / FIRST).read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / FIRST).write_bytes(whole[:size])
        num_steps = size * 6 // len(whole)
        if num_steps == 0:
            with pytest.raises(ValueError, match=r"TRACE must have all 2 ranks of a group in some"):
                load_trace([tmp_path])
            continue
        found = load_trace([tmp_path])
        assert equal(found, part(DEMAND, slice(num_steps)))
        assert found.num_left_out == 6 - num_steps


def test_steps_that_a_resumed_run_repeats_are_taken_once(tmp_path):
    again = made_up(
        num_steps=6, num_layers=2, num_ranks=2, num_tokens=9, num_experts=4, top_k=2, seed=1
    )
    save(part(DEMAND, slice(5)), tmp_path)
    save(part(again, slice(3, 6)), tmp_path, start=2)
    found = load_trace([tmp_path])
    counts = np.concatenate([DEMAND.counts[:3], again.counts[3:]])
    assert equal(found, dataclasses.replace(DEMAND, counts=counts))


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_is_no_recording_is_refused_and_nothing_is_unpickled(tmp_path):
    save(DEMAND, tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty must hold a recorded step \(\*\.npy\), got none"):
        load_trace([tmp_path / "empty"])
    with pytest.raises(ValueError, match="TRACE must name each file of one recording once, got"):
        load_trace([tmp_path / "a", tmp_path / "a" / FIRST])
    for changes in ({"num_tokens": 8}, {"pool": "expert"}, {"counts": DEMAND.counts[..., :3]}):
        save(dataclasses.replace(DEMAND, **changes), tmp_path / "b", group=1)
        with pytest.raises(ValueError, match=r"b/rank-00002.*: settings must be those of .*00000"):
            load_trace([tmp_path / "a", tmp_path / "b"])
    np.save(tmp_path / "numbers.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"numbers\.npy must be a trace, got dtype"):
        load_trace([tmp_path / "numbers.npy"])
    target, objects, file = tmp_path / "exploded", np.empty(1, object), io.BytesIO()
    objects[0] = Bomb(target)
    np.save(file, objects, allow_pickle=True)
    for content in (pickle.dumps(Bomb(target)), file.getvalue(), b"\x93NUMPY nothing more"):
        (tmp_path / "bad.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.npy must hold a recorded step .*, got none"):
            load_trace([tmp_path / "bad.npy"])
    assert not target.exists()
    assert record_dtype(3)["counts"].shape == (3,)
