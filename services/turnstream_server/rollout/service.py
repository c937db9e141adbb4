"""`turnstream rollout`: its gateway, its folder, and its end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Final

from turnstream_server.launch.stack import Stack
from turnstream_server.launch.up import start_gateway
from turnstream_server.rollout.files import RolloutFolder
from turnstream_server.rollout.gateway_calls import RunCalls
from turnstream_server.rollout.options import RolloutOptions, check_options
from turnstream_server.rollout.runner import Rollout
from turnstream_server.rollout.tasks_file import checked_tasks
from turnstream_server.settings import Settings, checked_gateway_url
from turnstream_server.waits import store_url

_SIGNALLED: Final = 128


def run_rollout(settings: Settings, options: RolloutOptions, say: Callable[[str], None]) -> int:
    """Run until no prompt is left; return the exit status, 130 or 143 after a signal.

    `say` prints a line. Errors are those of `Rollout.run` and `check_options`.
    """
    check_options(options)
    if options.tasks is not None:
        checked_tasks(options.tasks, num_samples=options.num_samples)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = RolloutFolder(options.folder)
    with (
        folder.locked(),
        _gateway(settings, options) as (url, check),
        contextlib.closing(RunCalls(url, options.run)) as calls,
    ):
        return asyncio.run(_until_signal(options, folder, calls, say=say, check=check))


@contextlib.contextmanager
def _gateway(
    settings: Settings, options: RolloutOptions
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of the gateway, and a check of its process where it is our own."""
    if not options.engines:
        yield checked_gateway_url(options.gateway, field="--gateway"), lambda: None
        return
    own = options.folder / "gateway"
    with Stack(own, store_url=store_url(settings, options.redis_url)) as stack:
        url = start_gateway(stack, folder=own, listen="127.0.0.1:0", engines=options.engines)
        yield url, stack.check


async def _until_signal(
    options: RolloutOptions,
    folder: RolloutFolder,
    calls: RunCalls,
    *,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> int:
    """Run a rollout; stop it at Ctrl-C and SIGTERM. Return the exit status."""
    loop = asyncio.get_running_loop()
    received: list[int] = []
    rollout = asyncio.create_task(Rollout(options, folder, calls, say=say, check=check).run())

    def stop(number: int) -> None:
        if not received:
            received.append(number)
            rollout.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    try:
        await rollout
    except asyncio.CancelledError:
        if not received:
            raise
    return _SIGNALLED + received[0] if received else 0
