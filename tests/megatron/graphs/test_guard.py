"""The rules of the guard on stand-ins of layers and helpers; real captures have their own files."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from padded_dispatch.megatron.graphs import guard


class Layer(nn.Module):
    """As much of a transformer layer as the guard reads."""

    def __init__(self, padded: bool = True, num_graphs: int = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_impl="none")
        self.padded, self.mode, self.layer_number = padded, "train", 3
        self.cuda_graphs = [None] * num_graphs


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch) -> dict[str, int]:
    steps = {"microbatches": 4}
    monkeypatch.setattr(guard, "_is_padded", lambda layer: getattr(layer, "padded", False))
    monkeypatch.setattr(guard, "_layer_invariants", lambda layer: {"mode": layer.mode})
    monkeypatch.setattr(guard, "get_num_microbatches", lambda: steps["microbatches"])
    return steps


def rows(*shape: int) -> Tensor:
    return torch.zeros(*shape, 2, dtype=torch.bfloat16)


def call(layer: Any, hidden_states: Any = None, **given: Any) -> tuple[Any, ...]:
    return layer, hidden_states, given


CAPTURE, REPLAY = guard._wrap_capture(call), guard._wrap_replay(call)


def test_a_replay_needs_the_invariants_of_its_capture(stand_ins):
    layer, captured = Layer(), rows(3, 4)
    assert CAPTURE(layer, captured, step=1) == (layer, captured, {"step": 1})
    other = rows(3, 4)
    assert REPLAY(layer, other, padding_mask=None) == (layer, other, {})
    assert REPLAY(layer, hidden_states=other) == (layer, other, {})
    for changed, named in ((rows(3, 5), "shape must stay .3, 4, 2."), (other.float(), "dtype")):
        with pytest.raises(ValueError, match=f"^hidden_states.{named}"):
            REPLAY(layer, changed)
        with pytest.raises(ValueError, match=f"^hidden_states.{named}"):
            REPLAY(layer, hidden_states=changed)
    layer.mode = "evaluation"
    with pytest.raises(ValueError, match=r"^mode must stay 'train', got 'evaluation': a captured"):
        REPLAY(layer, other)


def test_microbatches_count_where_each_has_a_graph(stand_ins):
    one, several = Layer(), Layer(num_graphs=4)
    for layer in (one, several):
        CAPTURE(layer, rows(3, 4))
        REPLAY(layer, rows(3, 4))
    stand_ins["microbatches"] = 5
    REPLAY(one, rows(3, 4))
    with pytest.raises(ValueError, match=r"^num_microbatches must stay 4, got 5:"):
        REPLAY(several, rows(3, 4))


def test_layers_of_others_are_left_alone():
    layer = Layer(padded=False)
    CAPTURE(layer, rows(3, 4))
    assert REPLAY(layer, "anything", padding_mask="a mask") == (
        layer,
        "anything",
        {"padding_mask": "a mask"},
    )


def test_padded_layers_of_a_model(monkeypatch):
    monkeypatch.setattr(guard, "TransformerLayer", Layer)
    first, second = Layer(), Layer()
    beside = nn.Linear(1, 1)
    beside.padded = True  # pyright: ignore[reportArgumentType]
    chunks = [nn.ModuleList([first, Layer(padded=False), beside]), nn.ModuleList([second])]
    assert guard.padded_layers(chunks) == [first, second]
    second.layer_number = 4
    assert guard.invariants_of([first, second]) == {
        "mode in layer 3": "train",
        "mode in layer 4": "train",
    }


def test_masks_and_packed_sequences_count_in_training(monkeypatch):
    packed: list[Any] = []
    noted: list[Any] = []
    monkeypatch.setattr(guard.schedule, "check_packed", lambda layer, given: packed.append(given))
    monkeypatch.setattr(guard.schedule, "note_mask", lambda layer, mask_BS: noted.append(mask_BS))
    choose = guard._wrap_local_choice(lambda layer, **given: False)
    given = {"packed_seq_params": "sequences", "padding_mask": "a mask"}
    layer, other = Layer(), Layer(padded=False)
    configs = SimpleNamespace(given_context=None)
    layer.mlp = SimpleNamespace(token_dispatcher=SimpleNamespace(configs=configs))
    for each in (layer.eval(), other.train()):
        assert choose(each, **given) is False
        assert (packed, noted) == ([], [])
    assert choose(layer.train(), **given) is False
    assert (packed, noted) == (["sequences"], ["a mask"])
    assert configs.given_context is False
    choose(layer, inference_context=object())
    assert configs.given_context is True
