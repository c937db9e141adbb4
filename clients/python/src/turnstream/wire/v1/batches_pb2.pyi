from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartRequest(_message.Message):
    __slots__ = ("run", "recovery_token", "dp_world_size", "session")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    recovery_token: str
    dp_world_size: int
    session: str
    def __init__(self, run: _Optional[str] = ..., recovery_token: _Optional[str] = ..., dp_world_size: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class StartReply(_message.Message):
    __slots__ = ("session_epoch", "next_step", "config_json", "lineage", "newest_version", "run")
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    session_epoch: int
    next_step: int
    config_json: str
    lineage: str
    newest_version: int
    run: str
    def __init__(self, session_epoch: _Optional[int] = ..., next_step: _Optional[int] = ..., config_json: _Optional[str] = ..., lineage: _Optional[str] = ..., newest_version: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("run", "step", "dp_rank", "dp_world_size", "session_epoch", "wait_s", "observer", "session", "previous_hash", "manifest_hash", "first_mini_batch", "first_byte", "content_hash", "reads_xxh3")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    FIRST_MINI_BATCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    READS_XXH3_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    dp_rank: int
    dp_world_size: int
    session_epoch: int
    wait_s: float
    observer: str
    session: str
    previous_hash: str
    manifest_hash: str
    first_mini_batch: int
    first_byte: int
    content_hash: str
    reads_xxh3: bool
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_world_size: _Optional[int] = ..., session_epoch: _Optional[int] = ..., wait_s: _Optional[float] = ..., observer: _Optional[str] = ..., session: _Optional[str] = ..., previous_hash: _Optional[str] = ..., manifest_hash: _Optional[str] = ..., first_mini_batch: _Optional[int] = ..., first_byte: _Optional[int] = ..., content_hash: _Optional[str] = ..., reads_xxh3: bool = ...) -> None: ...

class GetChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: MiniBatchHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[MiniBatchHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class MiniBatchHeader(_message.Message):
    __slots__ = ("step", "mini_batch", "num_mini_batches", "num_bytes", "content_hash", "first_byte")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MINI_BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_MINI_BATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    step: int
    mini_batch: int
    num_mini_batches: int
    num_bytes: int
    content_hash: str
    first_byte: int
    def __init__(self, step: _Optional[int] = ..., mini_batch: _Optional[int] = ..., num_mini_batches: _Optional[int] = ..., num_bytes: _Optional[int] = ..., content_hash: _Optional[str] = ..., first_byte: _Optional[int] = ...) -> None: ...

class SteppedRequest(_message.Message):
    __slots__ = ("run", "step", "session_epoch", "manifest_hash", "session", "dp_rank")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    session_epoch: int
    manifest_hash: str
    session: str
    dp_rank: int
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., session_epoch: _Optional[int] = ..., manifest_hash: _Optional[str] = ..., session: _Optional[str] = ..., dp_rank: _Optional[int] = ...) -> None: ...

class SteppedReply(_message.Message):
    __slots__ = ("recovery_token", "version_before")
    RECOVERY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_BEFORE_FIELD_NUMBER: _ClassVar[int]
    recovery_token: str
    version_before: int
    def __init__(self, recovery_token: _Optional[str] = ..., version_before: _Optional[int] = ...) -> None: ...

class CommittedRequest(_message.Message):
    __slots__ = ("run", "recovery_token", "session_epoch", "session", "dp_rank")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    run: str
    recovery_token: str
    session_epoch: int
    session: str
    dp_rank: int
    def __init__(self, run: _Optional[str] = ..., recovery_token: _Optional[str] = ..., session_epoch: _Optional[int] = ..., session: _Optional[str] = ..., dp_rank: _Optional[int] = ...) -> None: ...

class CommittedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("run", "observer", "first_step", "expiry_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    observer: str
    first_step: int
    expiry_s: float
    def __init__(self, run: _Optional[str] = ..., observer: _Optional[str] = ..., first_step: _Optional[int] = ..., expiry_s: _Optional[float] = ...) -> None: ...

class ObserveReply(_message.Message):
    __slots__ = ("next_step", "config_json", "lineage", "first_missed", "run")
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    next_step: int
    config_json: str
    lineage: str
    first_missed: int
    run: str
    def __init__(self, next_step: _Optional[int] = ..., config_json: _Optional[str] = ..., lineage: _Optional[str] = ..., first_missed: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class ObservedRequest(_message.Message):
    __slots__ = ("run", "observer", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    observer: str
    step: int
    def __init__(self, run: _Optional[str] = ..., observer: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class ObservedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnnounceVersionRequest(_message.Message):
    __slots__ = ("run", "version", "step", "session_epoch", "weights_uri", "session")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_URI_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    step: int
    session_epoch: int
    weights_uri: str
    session: str
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., session_epoch: _Optional[int] = ..., weights_uri: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class AnnounceVersionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
