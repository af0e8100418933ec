"""Routing in torch: the example by hand, gradients of autograd, and Megatron's bits."""

import math

import pytest
import torch
from torch.library import opcheck

from padded_dispatch.ops.router import _route, route, route_backward_in_torch, route_in_torch

FUNCTIONS = ("softmax", "chosen", "sigmoid")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("chosen", [0, 3 / 5, 2 / 5]),
        ("softmax", [0, 3 / 6, 2 / 6]),
        ("sigmoid", [0, 9 / 17, 8 / 17]),
    ],
)
def test_example(function, expected):
    logits_TE = torch.tensor([[0, math.log(3), math.log(2)]])
    found = route(logits_TE, top_k=2, function=function)
    assert found.map_TE.tolist() == [[False, True, True]]
    torch.testing.assert_close(found.probs_TE, torch.tensor([expected]))
    assert found.scores_TE is None
    assert found.counted_TE is None


def test_scores_are_those_of_all_experts():
    logits_TE = torch.tensor([[0, math.log(3), math.log(2)]])
    for function, total in (("chosen", [1, 3, 2]), ("sigmoid", [1 / 2, 3 / 4, 2 / 3])):
        found = route(logits_TE, top_k=2, function=function, with_scores=True)
        expected = torch.tensor([total]) / sum(total)
        torch.testing.assert_close(found.scores_TE, expected)
        assert found.counted_TE.tolist() == [[False, True, True]]
    found = route(logits_TE, top_k=2, function="softmax", with_scores=True)
    assert found.counted_TE is found.map_TE


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_autograds(function, top_k):
    """Bit by bit: as if autograd had run through the same operations."""
    generator = torch.Generator().manual_seed(top_k)
    logits_TE = torch.randn(33, 7, generator=generator)
    bias_E = torch.randn(7, generator=generator) if function == "sigmoid" else None
    grad_probs_TE, grad_scores_TE = torch.randn(2, 33, 7, generator=generator)
    for with_scores in (True, False):
        given = bias_E, top_k, function, 2.5, with_scores
        leaf_TE = logits_TE.clone().requires_grad_()
        probs_TE, map_TE, scores_TE, _ = route_in_torch(leaf_TE, *given)
        # The order in which Megatron's passes use them, so that autograd adds alike.
        outputs, grads = [probs_TE], [grad_probs_TE]
        if with_scores:
            outputs, grads = [probs_TE, scores_TE], [grad_probs_TE, grad_scores_TE]
        (expected_TE,) = torch.autograd.grad(outputs, leaf_TE, grads)
        grad_scores = grad_scores_TE if with_scores else None
        of_both = grad_probs_TE, grad_scores, logits_TE, bias_E, map_TE, top_k, function, 2.5
        assert torch.equal(route_backward_in_torch(*of_both), expected_TE)

        leaf_TE = logits_TE.clone().requires_grad_()
        found = route(
            leaf_TE,
            top_k=top_k,
            function=function,
            bias_E=bias_E,
            scaling=2.5,
            with_scores=with_scores,
        )
        outputs = [found.probs_TE, found.scores_TE] if with_scores else [found.probs_TE]
        assert torch.equal(torch.autograd.grad(outputs, leaf_TE, grads)[0], expected_TE)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_op_is_whole(function):
    logits_TE = torch.randn(5, 4, requires_grad=True)
    for with_scores in (True, False):
        opcheck(_route, (logits_TE, None, 2, function, 1.0, with_scores))
