"""Compare, before each call, everything that decides a result, so that no rank is left waiting.

An equal-split collective hangs, or silently returns wrong rows, if two ranks call it with different
shapes. So every eager call first compares its layer, the number of the call, shapes and rules over
the ranks, on the host. A mismatch raises the same error on every rank, before any device
collective. If a rank does not make the call, all waiting ranks raise an error after the time limit
of the process group; see `padded_dispatch.exchange.mirror`.

Every call compares. If only calls with new values did, a rank with a new value would wait in the
comparison for peers that are already in the device collective. Ranks compare a digest of the
values, computed once for the same values; they send the values only after a mismatch. (One
comparison for all layers of a pass would hang where a rank then skips a layer, or raises in one.)

Replaying a CUDA graph runs no Python, and its shapes cannot change. Inside a capture, shapes that
no eager call has compared before raise.
"""

import functools
import json
from collections.abc import Iterable
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig, require, require_tokens
from padded_dispatch.exchange.mirror import differing, mirror_of
from padded_dispatch.utils.phases import is_capturing, trains, unseen
from padded_dispatch.utils.tensors import is_dense, kind_of

# Named values. Ranks agree if the text of each value is the same.
NamedValues = tuple[tuple[str, object], ...]


class Agreement:
    """A comparison of named values over the ranks of process groups before each call.

    Creating one is a collective call of each group's members.

    Args:
        groups: the groups whose ranks must pass equal values. None and groups of one rank cost
            nothing. Two ranks without a common group are compared if other groups connect them.
    """

    def __init__(self, *groups: dist.ProcessGroup | None) -> None:
        wide = [group for group in groups if group is not None and group.size() > 1]
        self._mirror = mirror_of(wide) if wide else None
        self._number = 1
        if self._mirror is not None:
            self._mirror.num_agreements += 1
            self._number = self._mirror.num_agreements
        self._layer, self._caller = -1, f"dispatcher {self._number}"
        self._num_calls = 0
        self._compared: set[tuple[int, int]] = set()

    def name_layer(self, number: int) -> None:
        """Set the number of the layer in the model, which is compared, and shown in errors."""
        self._layer, self._caller = number, f"layer {number} (dispatcher {self._number})"

    def check(self, rules: NamedValues = (), /, **shapes: object) -> None:
        """Raise on every rank if a value differs between ranks.

        Args:
            rules: values that decide the result besides the shapes, and that may change between the
                last eager call and a capture.
            **shapes: values that a capture must share with an earlier eager call.

        Raises:
            ValueError: if a value, the layer or the number of calls so far differs between ranks;
                it lists each rank's. In a capture: if no eager call had these shapes.
            AbsentRanksError: if ranks do not make the call; it names them.
        """
        if self._mirror is None:
            return
        key = tuple(shapes.items())
        if is_capturing():
            if _digest(key) not in self._compared:
                shown = ", ".join(f"{name}={value}" for name, value in key)
                raise ValueError(
                    "shapes inside a CUDA graph capture must be those of an earlier eager step, "
                    f"got {shown}; run one eager step with the same shapes before capturing"
                )
            return
        self._num_calls += 1
        values = key + rules
        self._gather(_digest(values), 2, values)
        self._compared.add(_digest(key))

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers, on the host; a collective call.

        Call it after `check`. It raises as `check` does, if another rank is in a different call.
        """
        if self._mirror is None:
            return number
        return int(self._gather((number, 0), 0, ())[:, -2].max())

    @unseen()
    def _gather(self, numbers: tuple[int, int], num_equal: int, values: NamedValues) -> Tensor:
        """Return a row for each rank, its call and its `numbers`; raise if the calls differ.

        All calls gather rows of one size: gloo would abort if ranks in different calls sent others.

        Args:
            numbers: the numbers of this rank.
            num_equal: how many of `numbers` must be equal on all ranks; identifies the call, too.
            values: this rank's named values, which an error shows.
        """
        assert self._mirror is not None
        call = self._number, self._layer, self._num_calls, num_equal
        row = torch.tensor([*call, *numbers], device="cpu")
        where = f"call {self._num_calls} of {self._caller}"
        if num_equal == 0:  # All ranks have made that call.
            where = f"the largest T of {where}"
        rows = self._mirror.gather(row, where)
        num_equal += len(call)
        if (rows[:, :num_equal] != row[:num_equal]).any():
            text = _text((("caller", self._caller), ("call number", self._num_calls), *values))
            lengths = self._mirror.gather(torch.tensor([len(text)], device="cpu"), where)
            equal = list(text.ljust(int(lengths.max())))
            texts = self._mirror.gather(torch.tensor(equal, dtype=torch.uint8, device="cpu"), where)
            values_of = [dict(json.loads(bytes(text.tolist()))) for text in texts]
            raise ValueError(_differences(self._mirror.ranks, values_of))
        return rows


def agree_on_shapes(
    agreement: Agreement,
    config: DispatchConfig,
    tokens_TD: Tensor,
    rules: NamedValues,
    *,
    stays: bool = True,
    broke_off: bool = False,
    any_tokens: bool = False,
    **shapes: object,
) -> None:
    """Compare everything that decides a result over the ranks, before the routing is known.

    Tokens are checked after the comparison, so every rank raises and none is left in a collective.

    Args:
        agreement: over the layer's groups.
        config: of the pass.
        tokens_TD: its shape, dtype, kind of device and need for gradients are compared, as is
            whether this is the first pass of recompute.
        rules: further values that must be equal on all ranks.
        stays: whether a pass that backward recomputes has the config, and mode, of its first run.
        broke_off: whether the pass before has sent rows and not returned them, on this rank.
        any_tokens: ranks may have different T; for passes with `FIT`, which take as many slots as
            the largest T: see `Agreement.largest`.
        **shapes: further values, which a capture must share with an earlier eager call.

    Raises as `Agreement.check` does, on all ranks.
    """
    is_matrix = is_dense(tokens_TD) and tokens_TD.ndim == 2 and tokens_TD.is_floating_point()
    num_tokens, hidden_size = tokens_TD.shape if is_matrix else (0, kind_of(tokens_TD))
    agreement.check(
        (
            *rules,
            # If one rank alone had no gradients, or recomputed, its peers would wait in backward.
            ("gradients are enabled", torch.is_grad_enabled()),
            ("pass keeps what backward reads", trains()),
            ("tokens need gradients", is_matrix and tokens_TD.requires_grad),
            ("the pass before broke off", broke_off),
            ("config is that of the pass that is recomputed", stays),
        ),
        # All sizes follow from these.
        D=hidden_size,
        dtype=tokens_TD.dtype if is_matrix else None,
        device=tokens_TD.device.type if is_matrix else None,
        T="any but 0" if any_tokens and num_tokens else num_tokens,
        **vars(config),
        **shapes,
    )
    rule, fix = "be a floating point tensor [T, D]", "flatten what stands before D"
    require(is_matrix, "tokens_TD", hidden_size, rule, fix)
    require(tokens_TD.element_size() > 1, "tokens_TD", tokens_TD.dtype, "have at least 16 bits")
    require_tokens(num_tokens)
    require_returned(broke_off)
    rule = "stay as it is until backward has recomputed the pass, whose rows it decides"
    require(stays, "config", config, rule, "change it, or the mode, between steps")


def require_returned(broke_off: bool) -> None:
    """Raise if the pass before has sent rows and not returned them, on any rank."""
    require(
        not broke_off,
        "the pass before this one",
        "one that raised between sending tokens and returning rows",
        "run to its end on all ranks",
        "mend the first error; to go on, synchronize the devices of all ranks and run a new pass",
    )


# A text takes 0.2 ms. Values take some KiB, and T may change from call to call, in all layers.
@functools.lru_cache(maxsize=1024)
def _digest(values: NamedValues) -> tuple[int, int]:
    digest = blake2b(_text(values), digest_size=16).digest()
    return int.from_bytes(digest[:8], signed=True), int.from_bytes(digest[8:], signed=True)


def _text(values: NamedValues) -> bytes:
    return json.dumps([(name, str(value)) for name, value in values]).encode()


def _differences(ranks: list[int], values: list[dict[str, str]]) -> str:
    names: Iterable[str] = dict.fromkeys(name for of_rank in values for name in of_rank)
    words = []
    for name in names:
        column = [of_rank.get(name, "absent") for of_rank in values]
        if shown := differing(dict(zip(ranks, column, strict=True))):
            words.append(f"{name} is {shown}")
    return (
        "ranks disagree about a padded dispatch: "
        + "; ".join(words)
        + ". Give every rank the same config and batches of the same shape."
    )
