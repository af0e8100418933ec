"""A stand-in for Megatron-LM's `megatron.training.training`.

Its functions have Megatron-LM's names and arguments (0.16.1 to 0.19.0) and call each other through
the module, as Megatron-LM's do. The line of a step is made from `total_loss_dict` in the same way.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

MODULE = "megatron.training.training"
SUMS = "advanced iterations", "skipped iterations"


class Writer:
    """A stand-in for TensorBoard's writer and for W&B."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.flushed = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Keep a value, in the order of the calls."""
        self.scalars.setdefault(name, []).append((step, float(value)))

    def log(self, values: dict[str, float], step: int) -> None:
        """Keep values, as W&B's `log`."""
        for name, value in values.items():
            self.add_scalar(name, value, step)

    def flush(self) -> None:
        """Count the calls."""
        self.flushed += 1


def stand_in(monkeypatch: Any, sizes: Any) -> Any:
    """Put the module into `sys.modules`; `sizes` has `microbatches`, `seq` and `batch`.

    `lines`: step and means of each line that was printed. `calls`: the forward-backward function of
    each step. `before`: if set, called with the number of each step before it.
    """
    module: Any = ModuleType(MODULE)
    module.lines, module.calls = [], []
    module.tensorboard, module.wandb, module.before = Writer(), Writer(), None
    module.get_tensorboard_writer = lambda: module.tensorboard
    module.get_wandb_writer = lambda: module.wandb
    args = SimpleNamespace(
        iteration=0,
        curr_iteration=0,
        train_iters=6,
        log_interval=2,
        moe_per_layer_logging=False,
        load=None,
        save=None,
        micro_batch_size=sizes.batch,
        seq_length=sizes.seq,
    )
    module.get_args = lambda: args

    def train_step(
        forward_step_func,
        data_iterator,
        model,
        optimizer,
        opt_param_scheduler,
        config,
        forward_backward_func,
        iteration=None,
    ):
        module.calls.append(forward_backward_func)
        for chunk in model:
            chunk.zero_grad_buffer()
        forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=sizes.microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        return {}, 0

    def training_log(
        loss_dict, total_loss_dict, iteration, skipped_iter, more=None, is_first_iteration=False
    ):
        for name, count in zip(SUMS, (1 - skipped_iter, skipped_iter), strict=True):
            total_loss_dict[name] = total_loss_dict.get(name, 0) + count
        if iteration % args.log_interval != 0 and not is_first_iteration:
            return
        done = max(1, total_loss_dict[SUMS[0]])
        means = {n: v.item() / done for n, v in total_loss_dict.items() if n not in SUMS}
        module.lines.append((iteration, means))
        if not is_first_iteration:
            total_loss_dict |= dict.fromkeys(SUMS, 0)

    def train(forward_step_func, model, data_iterator, config, forward_backward_func):
        total_loss_dict: dict[str, Any] = {}
        for iteration in range(args.iteration, args.train_iters):
            if module.before is not None:
                module.before(iteration)
            args.curr_iteration = iteration
            results, skipped = module.train_step(
                forward_step_func,
                data_iterator,
                model,
                None,
                None,
                config,
                forward_backward_func,
                iteration=iteration,
            )
            module.training_log(
                results,
                total_loss_dict,
                iteration + 1,
                skipped,
                is_first_iteration=iteration == args.iteration,
            )

    module.train, module.train_step, module.training_log = train, train_step, training_log
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module
