"""One run of a store: its publishers, its batches, and what an operator does with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.from_settings import with_settings
from turnstream.calls import Calls, connect_calls
from turnstream.store.run.credits import Credit
from turnstream.store.run.rewards import RewardOutcome
from turnstream.store.run.tasks import Prompt
from turnstream.types import Leftover, TrajectoryKey, VersionAnnounced
from turnstream.types.names import RunId

if TYPE_CHECKING:
    from turnstream.generator import AsyncPublisher, Publisher
    from turnstream.worker.steps import Batches


class Run:
    """A run, from `Service.create_run` or `Service.run`.

    After its deletion every call raises RunNotFoundError, even if another run has the name by then.
    A store that cannot be reached is a StoreUnavailableError. A run can be pickled: see `Service`.

    Attributes:
        name: as it was created.
    """

    def __init__(
        self, calls: Calls, url: str, run_id: RunId, *, api_key: str | None = None
    ) -> None:
        self.name = run_id.name
        self._calls = calls
        self._url = url
        self._api_key = api_key
        self._id = run_id

    @property
    def config(self) -> BatchingConfig:
        """The settings in force, read from the store."""
        return self._calls.config(self._id)

    def publisher(self, writer: str | None = None, **options: Any) -> Publisher:
        """Return a publisher, which streams trajectories from threads.

        `writer` names this generator; `options` are the other arguments of `Publisher`.
        """
        # Here and not above: a trainer, and a command that reads the store, publish nothing.
        from turnstream.generator import Publisher

        return Publisher(self._url, self._id, writer=writer, **options)

    def async_publisher(self, writer: str | None = None, **options: Any) -> AsyncPublisher:
        """Return a publisher for asyncio, with the same arguments as `publisher`."""
        from turnstream.generator import AsyncPublisher

        return AsyncPublisher(self._url, self._id, writer=writer, **options)

    def batches(
        self,
        state: str | None = None,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        session: str | None = None,
        batcher: str | None = None,
        timeout_s: float = 600.0,
        max_prefetch_bytes: int = 1 << 30,
        api_key: str | None = None,
    ) -> Batches:
        """Begin to train: return the steps of this rank, from the step after `state`.

        Needs the extra `worker`: `pip install "turnstream[worker]"`.

        Args:
            state: the return value of `Step.done` from the loaded checkpoint; None begins at the
                first step.
            dp_rank: data-parallel rank of this process; None takes torchrun's RANK, else 0.
            dp_world_size: number of ranks; None takes torchrun's WORLD_SIZE, else 1.
            session: name of this start of the trainer, the same on all ranks and never used
                before; None makes one from torchrun's environment. See `worker.launch`.
            batcher: gRPC address of a batcher, "host:port", or "grpcs://host:port" with TLS;
                several with commas. None finds the batchers that are registered in the store, and
                finds them again when none of them answers.
            timeout_s: longest wait for a batcher, a mini-batch, or an acknowledgement.
            max_prefetch_bytes: bound of what is pulled ahead.
            api_key: key for the batcher; None takes that of `turnstream.connect`.

        Raises:
            InvalidConfigError: a rank outside the world, or ranks without a session.
            MissingExtraError: grpcio or pyarrow is not installed.
            StoreBehindError: the store does not have the step of `state`.
            AccessDeniedError: the key is not accepted, or may not train this run.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        # Here and not above: generators need neither grpcio nor pyarrow.
        from turnstream.worker.launch import find_launch
        from turnstream.worker.steps import Batches
        from turnstream.worker.stream import BatchStream

        _ = self.config  # a batcher takes the id of a deleted run for the name of a later one
        launch = find_launch(dp_rank, dp_world_size, session)
        stream = BatchStream(
            batcher or self._calls.batchers(),
            self._id,
            launch.dp_rank,
            launch.dp_world_size,
            state,
            session=launch.session or None,
            timeout_s=timeout_s,
            max_prefetch_bytes=max_prefetch_bytes,
            api_key=self._api_key if api_key is None else api_key,
        )
        return Batches(stream)

    def add_prompts(self, prompts: Sequence[Prompt], *, first: int | None = None) -> int:
        """Add prompts, which `Publisher.next_task` takes in order; return their total number.

        `first` is the number of the first of them, from 1. A call that is repeated with the same
        number adds nothing twice.
        """
        return self._calls.add_prompts(self._id, prompts, first=first)

    def credit(self) -> Credit:
        """Return how many groups may start now, and the reason where none may."""
        return self._calls.credit(self._id)

    def post_reward(
        self,
        key: TrajectoryKey,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
    ) -> RewardOutcome:
        """Post the reward of a trajectory that was sealed with `awaits_reward`."""
        return self._calls.post_reward(self._id, key, reward, reward_components=reward_components)

    def wait_for_version(self, *, above: int = -1, timeout_s: float = 600.0) -> VersionAnnounced:
        """Wait for a policy version above `above`; return the newest, or raise NotReadyError."""
        return self._calls.wait_for_version(self._id, above=above, timeout_s=timeout_s)

    def revise(self, *, from_step: int, **settings: Any) -> int:
        """Change settings from a step on; return the number of the revision.

        Raises:
            InvalidConfigError: a setting is unknown, or cannot have this value.
            ConflictError: the step is planned.
        """
        config = with_settings(self.config, settings)
        return self._calls.revise(self._id, config, from_step=from_step)

    def pause(self, reason: str = "") -> bool:
        """Start no group and plan no step until `resume`; return whether that is new."""
        return self._calls.pause(self._id, reason)

    def resume(self) -> bool:
        """End a pause; return whether there was one."""
        return self._calls.resume(self._id)

    def close(self, reason: str = "", *, leftover: Leftover = "short") -> None:
        """Start no new group. Batches end after the last step; see `leftover`.

        Args:
            reason: for people.
            leftover: complete groups that make no whole batch are trained in a smaller one
                ("short"), kept for a reopened run ("carry") or ended ("drop").
        """
        self._calls.close_run(self._id, reason, leftover=leftover)

    def reopen(self) -> bool:
        """Take new groups again; return whether the run was closed."""
        return self._calls.reopen(self._id)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_run, (self._url, self._id, self._api_key)

    def __repr__(self) -> str:
        return f"Run({str(self._id)!r})"


def _open_run(url: str, run_id: RunId, api_key: str | None) -> Run:
    """Return an unpickled run with a client of this process, which connects at its first call."""
    return Run(connect_calls(url), url, run_id, api_key=api_key)
