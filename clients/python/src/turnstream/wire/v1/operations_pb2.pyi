from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetOperationsRequest(_message.Message):
    __slots__ = ("model_id", "first", "last", "dp_rank", "dp_world_size", "skipped", "reads_xxh3")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    READS_XXH3_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    first: int
    last: int
    dp_rank: int
    dp_world_size: int
    skipped: _containers.RepeatedScalarFieldContainer[int]
    reads_xxh3: bool
    def __init__(self, model_id: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_world_size: _Optional[int] = ..., skipped: _Optional[_Iterable[int]] = ..., reads_xxh3: bool = ...) -> None: ...

class OperationChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: OperationShareHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[OperationShareHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class OperationShareHeader(_message.Message):
    __slots__ = ("index", "num_shares", "loss", "settings", "num_bytes", "content_hash")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_shares: int
    loss: str
    settings: _containers.ScalarMap[str, float]
    num_bytes: int
    content_hash: str
    def __init__(self, index: _Optional[int] = ..., num_shares: _Optional[int] = ..., loss: _Optional[str] = ..., settings: _Optional[_Mapping[str, float]] = ..., num_bytes: _Optional[int] = ..., content_hash: _Optional[str] = ...) -> None: ...
