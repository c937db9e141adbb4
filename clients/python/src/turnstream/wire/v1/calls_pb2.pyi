from turnstream.wire.v1 import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Calls(_message.Message):
    __slots__ = ("run", "is_run_id", "writer", "store", "is_grouped", "calls")
    RUN_FIELD_NUMBER: _ClassVar[int]
    IS_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    IS_GROUPED_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    run: str
    is_run_id: bool
    writer: str
    store: str
    is_grouped: bool
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    def __init__(self, run: _Optional[str] = ..., is_run_id: bool = ..., writer: _Optional[str] = ..., store: _Optional[str] = ..., is_grouped: bool = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("open_group", "append_turns", "post_seals", "abandon", "count_conflict", "post_reward", "close_run", "read_config", "renew_leases", "reserve", "adopt", "list_lapsed", "read_group", "next_task", "read_waits", "read_turns", "await_wake")
    OPEN_GROUP_FIELD_NUMBER: _ClassVar[int]
    APPEND_TURNS_FIELD_NUMBER: _ClassVar[int]
    POST_SEALS_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    COUNT_CONFLICT_FIELD_NUMBER: _ClassVar[int]
    POST_REWARD_FIELD_NUMBER: _ClassVar[int]
    CLOSE_RUN_FIELD_NUMBER: _ClassVar[int]
    READ_CONFIG_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    LIST_LAPSED_FIELD_NUMBER: _ClassVar[int]
    READ_GROUP_FIELD_NUMBER: _ClassVar[int]
    NEXT_TASK_FIELD_NUMBER: _ClassVar[int]
    READ_WAITS_FIELD_NUMBER: _ClassVar[int]
    READ_TURNS_FIELD_NUMBER: _ClassVar[int]
    AWAIT_WAKE_FIELD_NUMBER: _ClassVar[int]
    open_group: OpenGroup
    append_turns: AppendTurns
    post_seals: PostSeals
    abandon: Abandon
    count_conflict: CountConflict
    post_reward: PostReward
    close_run: CloseRun
    read_config: ReadConfig
    renew_leases: RenewLeases
    reserve: Reserve
    adopt: Adopt
    list_lapsed: ListLapsed
    read_group: ReadGroup
    next_task: NextTask
    read_waits: ReadWaits
    read_turns: ReadTurns
    await_wake: AwaitWake
    def __init__(self, open_group: _Optional[_Union[OpenGroup, _Mapping]] = ..., append_turns: _Optional[_Union[AppendTurns, _Mapping]] = ..., post_seals: _Optional[_Union[PostSeals, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., count_conflict: _Optional[_Union[CountConflict, _Mapping]] = ..., post_reward: _Optional[_Union[PostReward, _Mapping]] = ..., close_run: _Optional[_Union[CloseRun, _Mapping]] = ..., read_config: _Optional[_Union[ReadConfig, _Mapping]] = ..., renew_leases: _Optional[_Union[RenewLeases, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., list_lapsed: _Optional[_Union[ListLapsed, _Mapping]] = ..., read_group: _Optional[_Union[ReadGroup, _Mapping]] = ..., next_task: _Optional[_Union[NextTask, _Mapping]] = ..., read_waits: _Optional[_Union[ReadWaits, _Mapping]] = ..., read_turns: _Optional[_Union[ReadTurns, _Mapping]] = ..., await_wake: _Optional[_Union[AwaitWake, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("key", "epoch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key: _records_pb2.TrajectoryKey
    epoch: int
    def __init__(self, key: _Optional[_Union[_records_pb2.TrajectoryKey, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenGroup(_message.Message):
    __slots__ = ("group", "samples", "attempts", "prompt_number", "is_again")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    group: _records_pb2.GroupOpened
    samples: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    prompt_number: int
    is_again: bool
    def __init__(self, group: _Optional[_Union[_records_pb2.GroupOpened, _Mapping]] = ..., samples: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., prompt_number: _Optional[int] = ..., is_again: bool = ...) -> None: ...

class AppendTurns(_message.Message):
    __slots__ = ("lease", "is_placed", "first", "records", "seal", "bytes_before")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    IS_PLACED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    is_placed: bool
    first: int
    records: _containers.RepeatedScalarFieldContainer[bytes]
    seal: bytes
    bytes_before: int
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., is_placed: bool = ..., first: _Optional[int] = ..., records: _Optional[_Iterable[bytes]] = ..., seal: _Optional[bytes] = ..., bytes_before: _Optional[int] = ...) -> None: ...

class PostSeals(_message.Message):
    __slots__ = ("seals",)
    SEALS_FIELD_NUMBER: _ClassVar[int]
    seals: _containers.RepeatedCompositeFieldContainer[PostedSeal]
    def __init__(self, seals: _Optional[_Iterable[_Union[PostedSeal, _Mapping]]] = ...) -> None: ...

class PostedSeal(_message.Message):
    __slots__ = ("lease", "num_bytes", "record", "awaits_reward")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    AWAITS_REWARD_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    num_bytes: int
    record: bytes
    awaits_reward: bool
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., num_bytes: _Optional[int] = ..., record: _Optional[bytes] = ..., awaits_reward: bool = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("lease", "reason")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    reason: str
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class CountConflict(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _records_pb2.TrajectoryKey
    reason: str
    def __init__(self, key: _Optional[_Union[_records_pb2.TrajectoryKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class PostReward(_message.Message):
    __slots__ = ("reward",)
    REWARD_FIELD_NUMBER: _ClassVar[int]
    reward: _records_pb2.RewardPosted
    def __init__(self, reward: _Optional[_Union[_records_pb2.RewardPosted, _Mapping]] = ...) -> None: ...

class CloseRun(_message.Message):
    __slots__ = ("reason", "leftover")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFTOVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    leftover: str
    def __init__(self, reason: _Optional[str] = ..., leftover: _Optional[str] = ...) -> None: ...

class ReadConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewLeases(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("lease", "num_bytes")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    num_bytes: int
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _records_pb2.TrajectoryKey
    def __init__(self, key: _Optional[_Union[_records_pb2.TrajectoryKey, _Mapping]] = ...) -> None: ...

class ListLapsed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadGroup(_message.Message):
    __slots__ = ("group_id", "num_samples")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    num_samples: int
    def __init__(self, group_id: _Optional[str] = ..., num_samples: _Optional[int] = ...) -> None: ...

class NextTask(_message.Message):
    __slots__ = ("refills_only", "num_passed")
    REFILLS_ONLY_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSED_FIELD_NUMBER: _ClassVar[int]
    refills_only: bool
    num_passed: int
    def __init__(self, refills_only: bool = ..., num_passed: _Optional[int] = ...) -> None: ...

class ReadWaits(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadTurns(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _records_pb2.TrajectoryKey
    def __init__(self, key: _Optional[_Union[_records_pb2.TrajectoryKey, _Mapping]] = ...) -> None: ...

class AwaitWake(_message.Message):
    __slots__ = ("wake_id", "timeout_ms")
    WAKE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    wake_id: str
    timeout_ms: int
    def __init__(self, wake_id: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Replies(_message.Message):
    __slots__ = ("run", "store", "syncs_each_write", "is_aborted", "replies")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    SYNCS_EACH_WRITE_FIELD_NUMBER: _ClassVar[int]
    IS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    run: str
    store: str
    syncs_each_write: bool
    is_aborted: bool
    replies: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, run: _Optional[str] = ..., store: _Optional[str] = ..., syncs_each_write: bool = ..., is_aborted: bool = ..., replies: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("number", "text", "items", "refusal")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    number: int
    text: bytes
    items: Values
    refusal: str
    def __init__(self, number: _Optional[int] = ..., text: _Optional[bytes] = ..., items: _Optional[_Union[Values, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
