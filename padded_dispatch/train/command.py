"""`padded-dispatch train`: from a command line to an exit code."""

from padded_dispatch.train.arguments import parse


def main(argv: list[str]) -> int:
    """Train; return 0 if the loss fell or there was one step only, 1 if it did not fall.

    Raises:
        ValueError: a mistake in the flags, found before any worker starts.
        SystemExit: see `start_workers`.
    """
    settings = parse(argv)
    # Imported late, since they bring Megatron: --help and a typo need neither.
    from padded_dispatch.train.check import check, held_folders
    from padded_dispatch.train.loop import work
    from padded_dispatch.utils.launch import start_workers

    with held_folders(settings):
        check(settings)
        outcome = start_workers(work, (settings,), num_workers=settings.layout.workers)
    return 1 if outcome.fell is False else 0
