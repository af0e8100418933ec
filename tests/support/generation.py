"""Text generation by Megatron's static engine: a padded model beside a stock one.

Three models with the same weights generate from the same prompts: a stock dropless one in fp32 and
in the case's dtype, and a padded one whose capacity factor drops half of its rows in training. The
first one's tokens are fed to all, so that all see the same inputs after a near tie, too. Logits of
each step are compared: the error of the padded model, against fp32, is at most twice that of the
stock one, plus one ulp of the largest logit.

Transformer Engine 2.20.2 takes parts of a fused projection, and of a cache for more requests than
there are, for contiguous tensors, so cuDNN's attention reads memory that was never written, in
stock, too. All models here hand their attention contiguous tensors (`contiguous_attention`).
"""

import faulthandler
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference import utils as inference_utils
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine, static_engine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.options import Experts
from padded_dispatch.utils.patches import Patches
from tests.support.gpt import Sizes
from tests.support.machines import ranks_on
from tests.support.parity import megatron

try:  # Up to 0.17.
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )
except ImportError:
    InferenceWrapperConfig = None

# With its engines, Megatron lets these signals dump stacks; worker pools end by SIGTERM.
for _number in (signal.SIGINT, signal.SIGTERM):
    faulthandler.unregister(_number)


@dataclass(frozen=True, kw_only=True)
class GenerationCase(Sizes):
    """A model, its requests, and how it generates.

    `experts`: the option.
    `prompts`: lengths of a rank's prompts, the longest and the shortest first.
    `uneven`: ranks after the first have two requests only.
    `new_tokens`: tokens that each request generates.
    """

    experts: Experts = "module"
    uneven: bool = False
    prompts: tuple[int, ...] = (9, 5, 7)
    new_tokens: int = 5

    @property
    def max_tokens(self) -> int:
        return max(self.prompts) + self.new_tokens


def contiguous_attention(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `forward` of an attention so that its queries, keys and values are contiguous."""

    def attend_to(attention: Any, *tensors: Any, **options: Any) -> Any:
        query, key, value, *others = tensors
        given = (tensor.contiguous() for tensor in (query, key, value))
        return forward(attention, *given, *others, **options)

    return attend_to


class _Numbers:
    """A tokenizer of texts that are numbers."""

    def __init__(self, vocab: int) -> None:
        self.vocab_size, self.bos, self.eod, self.pad = vocab, 1, 0, 0

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int], **kwargs: Any) -> str:
        return " ".join(map(str, tokens))

    def offsets(self, tokens: list[int], text: str) -> list[int]:
        return [0] * len(tokens)


def prompts_of(case: GenerationCase, rank: int) -> list[str]:
    generator = torch.Generator().manual_seed(rank)
    lengths = case.prompts[:2] if case.uneven and rank else case.prompts
    draws = [torch.randint(2, case.vocab, (length,), generator=generator) for length in lengths]
    return [" ".join(map(str, draw.tolist())) for draw in draws]


def gpt(
    case: GenerationCase, dtype: torch.dtype, *, padded: bool, weights: dict[str, Any] | None = None
) -> Any:
    """Build a model in evaluation mode, with the weights of another one if they are given."""
    model_parallel_cuda_manual_seed(7, te_rng_tracker=case.on_gpu, force_reset_rng=True)
    torch.manual_seed(7)
    ours = {"moe_expert_capacity_factor": 0.5, "experts": case.experts}
    config = replace(case, dtype=dtype).config(
        "padded_alltoall" if padded else "alltoall",
        init_method_std=2 / case.hidden**0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **(ours if padded else {}),
    )
    experts = {"num_experts": case.num_experts, "moe_grouped_gemm": case.on_gpu}
    spec = get_gpt_layer_local_spec
    if case.on_gpu:
        spec = get_gpt_layer_with_transformer_engine_spec
    model: Any = GPTModel(config, spec(**experts), case.vocab, case.max_tokens)
    if weights is not None:
        model.load_state_dict(weights)
    if case.on_gpu:
        model = model.cuda()
    return (Float16Module(config, model) if config.bf16 else model.to(dtype)).eval()


def generate(
    case: GenerationCase, model: Any, given: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Let the static engine generate from this rank's prompts, greedily, or take `given` tokens.

    Return logits of each step, [steps, B, V], in fp64, and the tokens that were taken, [steps, B].
    """
    inference_utils.moe_layer_cache = None  # Megatron keeps the first model's layers.
    prompts, max_batch = prompts_of(case, dist.get_rank()), len(case.prompts)
    config, logits, taken = model.config, [], []
    if InferenceWrapperConfig is not None:
        wrapper_config = InferenceWrapperConfig(
            hidden_size=case.hidden,
            params_dtype=config.params_dtype,
            inference_batch_times_seqlen_threshold=-1,
            padded_vocab_size=case.vocab,
            inference_max_requests=max_batch,
            inference_max_seq_length=case.max_tokens,
        )
        context = StaticInferenceContext.from_config(wrapper_config)
        wrapped = GPTInferenceWrapper(model, wrapper_config, context)
    else:
        context = StaticInferenceContext(max_batch, case.max_tokens)
        wrapped = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapped, _Numbers(case.vocab))
    engine = StaticInferenceEngine(controller, max_batch_size=max_batch, legacy=True)

    def sample(last_token_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tokens = last_token_logits.argmax(-1) if given is None else given[len(logits)]
        logits.append(last_token_logits.double())
        taken.append(tokens)
        return tokens

    controller.sample_from_logits = sample
    sampling = SamplingParams(top_k=1, num_tokens_to_generate=case.new_tokens)
    sampling.add_attributes({"no_early_termination": True})
    requests = engine.generate(prompts=prompts, sampling_params=sampling)
    if hasattr(inference_utils, "InferenceMode"):  # From 0.18 on; the engine never unsets it.
        inference_utils.InferenceMode.unset_active()
    assert all(len(request.generated_tokens) == case.new_tokens for request in requests)
    return torch.stack(logits), taken


def generates_as_stock(case: GenerationCase) -> list[str]:
    """Compare the models, by the root mean square against fp32. Runs on all ranks."""
    with _world(case):
        dtype = torch.bfloat16 if case.on_gpu else torch.float32
        exact_dtype = torch.float32 if case.on_gpu else torch.float64
        first = gpt(case, exact_dtype, padded=False)
        wanted, tokens = generate(case, first)
        weights = first.state_dict() if case.on_gpu else None  # On CPUs all dtypes draw alike.
        plain = gpt(case, dtype, padded=False, weights=weights)
        stock, _ = generate(case, plain, tokens)
        del plain
        model = gpt(case, dtype, padded=True, weights=weights)
        ours, _ = generate(case, model, tokens)
        error, stock_error = ((one - wanted).square().mean().sqrt() for one in (ours, stock))
        limit = 2 * stock_error + torch.finfo(dtype).eps * wanted.abs().max()
        # A near tie in fp32 may be decided otherwise by the noise of the case's dtype.
        top = wanted.topk(2).values
        tied = top[..., 0] - top[..., 1] < 8 * stock_error
        others = ours.argmax(-1) != wanted.argmax(-1)
        counts = [m.token_dispatcher.eval_counters for m in model.modules() if is_padded(m)]
        dropped: Any = sum((one.demand_E - one.kept_E).sum() for one in counts)
        dist.all_reduce(dropped)  # A rank counts what it asked for, and what it received.
        broken = [f"{int(dropped)} rows were dropped"] if dropped else []
        if not error <= limit:
            broken.append(f"logits are off by {error}, above {limit}")
        if num_others := int((others & ~tied).sum()):
            broken.append(f"{num_others} greedy tokens differ from stock")
        del model, counts
        gc.collect()
        return broken


def _with_lists(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an all-to-all so that it takes its splits as tensors, too.

    Megatron's own dispatcher makes lists of them for GPUs only.
    """

    def listed(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all(*args, **kwargs)

    return listed


@contextmanager
def _world(case: GenerationCase) -> Iterator[None]:
    with (
        ranks_on(case.machines),
        megatron(case.device, **case.groups),
        Patches() as patches,
    ):
        patches.set(static_engine, "HAVE_TQDM", True)
        if case.on_gpu:
            from megatron.core.extensions.transformer_engine import TEDotProductAttention as Core

            patches.set(Core, "forward", contiguous_attention(Core.forward))
        else:
            patches.set(dist, "all_to_all_single", _with_lists(dist.all_to_all_single))
        yield
