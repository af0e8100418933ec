"""`padded-dispatch train`: from a command line to an exit code."""

from importlib.util import find_spec

from padded_dispatch.megatron.config import dispatch_config
from padded_dispatch.train import checkpoint
from padded_dispatch.train.arguments import parse
from padded_dispatch.train.data import Windows, load_corpus
from padded_dispatch.train.loop import work
from padded_dispatch.train.model import transformer_config
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.results import require_results


def main(argv: list[str]) -> int:
    """Train; 0 when the loss fell or there was one step only, 1 when it did not fall.

    Raises:
        ValueError: the user's mistakes, found before there are workers.
        SystemExit: see `start_workers`.
    """
    settings = parse(argv)
    check(settings)
    outcome = start_workers(work, (settings,), num_workers=settings.layout.workers)
    return 1 if outcome.fell is False else 0


def check(settings: Settings) -> None:
    """Refuse what only Megatron's config, the text, the disk or missing packages tell.

    Raises:
        ValueError: names what is not possible and what to change.
    """
    output, recipe = settings.output, settings.recipe
    Windows(load_corpus().held_out, recipe.seq_length, recipe.seed)  # The shorter text.
    if output.results is not None:
        require_results("results", output.results)
    if output.resume:
        checkpoint.check_resumable(settings)
    if output.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "tensorboard=True is not possible: pip install 'padded-dispatch[train]' first"
        )
    keeps = output.resume or output.save_every is not None
    if keeps and settings.layout.device == "cuda" and find_spec("psutil") is None:
        raise ValueError(
            f"save_every={output.save_every} is not possible: Megatron's checkpoints need psutil; "
            "pip install 'padded-dispatch[train]' first"
        )
    config = transformer_config(settings)
    if settings.dispatch.dispatcher == "padded_alltoall":
        options, layout = settings.dispatch.padded, settings.layout
        dispatch_config(config, options, num_ranks=layout.ep, etp_size=layout.etp)
