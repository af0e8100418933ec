"""The worker processes of a running command, found in /proc."""


def workers_of(pid: int) -> list[int]:
    """Return the workers that the process `pid` has started, in no order."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return [child for child in children if "spawn_main" in command_of(child)]


def command_of(pid: int) -> str:
    """Return the command line of a process; its words end with zero bytes."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()
