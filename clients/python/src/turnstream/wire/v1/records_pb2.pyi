from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionRun(_message.Message):
    __slots__ = ("version", "count")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    version: int
    count: int
    def __init__(self, version: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ArraySpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "num_shared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    num_shared: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., num_shared: _Optional[int] = ...) -> None: ...

class TurnHeader(_message.Message):
    __slots__ = ("index", "parent_turn", "shared_tokens", "num_response_tokens", "arrays", "version_runs", "anchor", "call_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PARENT_TURN_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_RUNS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    parent_turn: int
    shared_tokens: int
    num_response_tokens: int
    arrays: _containers.RepeatedCompositeFieldContainer[ArraySpec]
    version_runs: _containers.RepeatedCompositeFieldContainer[VersionRun]
    anchor: int
    call_id: str
    def __init__(self, index: _Optional[int] = ..., parent_turn: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., num_response_tokens: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[ArraySpec, _Mapping]]] = ..., version_runs: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ..., anchor: _Optional[int] = ..., call_id: _Optional[str] = ...) -> None: ...

class TurnHeaderParts(_message.Message):
    __slots__ = ("index", "parent_turn", "shared_tokens", "num_response_tokens", "arrays", "version_runs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PARENT_TURN_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_RUNS_FIELD_NUMBER: _ClassVar[int]
    index: int
    parent_turn: int
    shared_tokens: int
    num_response_tokens: int
    arrays: _containers.RepeatedScalarFieldContainer[bytes]
    version_runs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, index: _Optional[int] = ..., parent_turn: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., num_response_tokens: _Optional[int] = ..., arrays: _Optional[_Iterable[bytes]] = ..., version_runs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TurnShape(_message.Message):
    __slots__ = ("parent_turn", "shared_tokens", "num_new_prompt_tokens", "num_response_tokens", "num_trained_tokens", "reward", "payload_crc", "trained_versions", "anchor", "is_left_out")
    PARENT_TURN_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CRC_FIELD_NUMBER: _ClassVar[int]
    TRAINED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    IS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    parent_turn: int
    shared_tokens: int
    num_new_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    reward: float
    payload_crc: int
    trained_versions: _containers.RepeatedCompositeFieldContainer[VersionRun]
    anchor: int
    is_left_out: bool
    def __init__(self, parent_turn: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., num_new_prompt_tokens: _Optional[int] = ..., num_response_tokens: _Optional[int] = ..., num_trained_tokens: _Optional[int] = ..., reward: _Optional[float] = ..., payload_crc: _Optional[int] = ..., trained_versions: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ..., anchor: _Optional[int] = ..., is_left_out: bool = ...) -> None: ...

class TrajectoryKey(_message.Message):
    __slots__ = ("group_id", "sample", "attempt")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample: int
    attempt: int
    def __init__(self, group_id: _Optional[str] = ..., sample: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class TrajectorySealed(_message.Message):
    __slots__ = ("key", "lease_epoch", "status", "reward", "reward_components", "turns", "oldest_version", "newest_version", "num_payload_bytes", "has_logprobs", "sampling", "tags", "metrics", "awaits_reward")
    class RewardComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SamplingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_REWARD_FIELD_NUMBER: _ClassVar[int]
    key: TrajectoryKey
    lease_epoch: int
    status: str
    reward: float
    reward_components: _containers.ScalarMap[str, float]
    turns: _containers.RepeatedCompositeFieldContainer[TurnShape]
    oldest_version: int
    newest_version: int
    num_payload_bytes: int
    has_logprobs: bool
    sampling: _containers.ScalarMap[str, float]
    tags: _containers.ScalarMap[str, str]
    metrics: _containers.ScalarMap[str, float]
    awaits_reward: bool
    def __init__(self, key: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., lease_epoch: _Optional[int] = ..., status: _Optional[str] = ..., reward: _Optional[float] = ..., reward_components: _Optional[_Mapping[str, float]] = ..., turns: _Optional[_Iterable[_Union[TurnShape, _Mapping]]] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., num_payload_bytes: _Optional[int] = ..., has_logprobs: bool = ..., sampling: _Optional[_Mapping[str, float]] = ..., tags: _Optional[_Mapping[str, str]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., awaits_reward: bool = ...) -> None: ...

class GroupOpened(_message.Message):
    __slots__ = ("group_id", "prompt_uid", "num_samples", "num_needed", "purpose")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_UID_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_NEEDED_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_uid: str
    num_samples: int
    num_needed: int
    purpose: str
    def __init__(self, group_id: _Optional[str] = ..., prompt_uid: _Optional[str] = ..., num_samples: _Optional[int] = ..., num_needed: _Optional[int] = ..., purpose: _Optional[str] = ...) -> None: ...

class TrajectoryAbandoned(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: TrajectoryKey
    reason: str
    def __init__(self, key: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class TrajectoryDied(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: TrajectoryKey
    reason: str
    def __init__(self, key: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class VersionAnnounced(_message.Message):
    __slots__ = ("version", "step", "lineage", "weights_uri")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_URI_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    lineage: str
    weights_uri: str
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ..., lineage: _Optional[str] = ..., weights_uri: _Optional[str] = ...) -> None: ...

class RunClosed(_message.Message):
    __slots__ = ("reason", "leftover")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFTOVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    leftover: str
    def __init__(self, reason: _Optional[str] = ..., leftover: _Optional[str] = ...) -> None: ...

class RunReopened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolledBack(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class RunFinished(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class DeadlineFired(_message.Message):
    __slots__ = ("group_id", "awaited", "num_refills")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFILLS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    awaited: TrajectoryKey
    num_refills: int
    def __init__(self, group_id: _Optional[str] = ..., awaited: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., num_refills: _Optional[int] = ...) -> None: ...

class RefillGranted(_message.Message):
    __slots__ = ("key", "number")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    key: TrajectoryKey
    number: int
    def __init__(self, key: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class RewardPosted(_message.Message):
    __slots__ = ("key", "reward", "reward_components")
    class RewardComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    key: TrajectoryKey
    reward: float
    reward_components: _containers.ScalarMap[str, float]
    def __init__(self, key: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., reward: _Optional[float] = ..., reward_components: _Optional[_Mapping[str, float]] = ...) -> None: ...

class BatchDue(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ConfigRevised(_message.Message):
    __slots__ = ("revision", "step")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    revision: int
    step: int
    def __init__(self, revision: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class PlansWithdrawn(_message.Message):
    __slots__ = ("step", "dead")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    step: int
    dead: _containers.RepeatedCompositeFieldContainer[TrajectoryKey]
    def __init__(self, step: _Optional[int] = ..., dead: _Optional[_Iterable[_Union[TrajectoryKey, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("group_opened", "trajectory_sealed", "trajectory_abandoned", "trajectory_died", "version_announced", "run_closed", "deadline_fired", "refill_granted", "reward_posted", "batch_due", "config_revised", "run_reopened", "run_finished", "rolled_back", "plans_withdrawn")
    GROUP_OPENED_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_SEALED_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ABANDONED_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_DIED_FIELD_NUMBER: _ClassVar[int]
    VERSION_ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    RUN_CLOSED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIRED_FIELD_NUMBER: _ClassVar[int]
    REFILL_GRANTED_FIELD_NUMBER: _ClassVar[int]
    REWARD_POSTED_FIELD_NUMBER: _ClassVar[int]
    BATCH_DUE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISED_FIELD_NUMBER: _ClassVar[int]
    RUN_REOPENED_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    PLANS_WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    group_opened: GroupOpened
    trajectory_sealed: TrajectorySealed
    trajectory_abandoned: TrajectoryAbandoned
    trajectory_died: TrajectoryDied
    version_announced: VersionAnnounced
    run_closed: RunClosed
    deadline_fired: DeadlineFired
    refill_granted: RefillGranted
    reward_posted: RewardPosted
    batch_due: BatchDue
    config_revised: ConfigRevised
    run_reopened: RunReopened
    run_finished: RunFinished
    rolled_back: RolledBack
    plans_withdrawn: PlansWithdrawn
    def __init__(self, group_opened: _Optional[_Union[GroupOpened, _Mapping]] = ..., trajectory_sealed: _Optional[_Union[TrajectorySealed, _Mapping]] = ..., trajectory_abandoned: _Optional[_Union[TrajectoryAbandoned, _Mapping]] = ..., trajectory_died: _Optional[_Union[TrajectoryDied, _Mapping]] = ..., version_announced: _Optional[_Union[VersionAnnounced, _Mapping]] = ..., run_closed: _Optional[_Union[RunClosed, _Mapping]] = ..., deadline_fired: _Optional[_Union[DeadlineFired, _Mapping]] = ..., refill_granted: _Optional[_Union[RefillGranted, _Mapping]] = ..., reward_posted: _Optional[_Union[RewardPosted, _Mapping]] = ..., batch_due: _Optional[_Union[BatchDue, _Mapping]] = ..., config_revised: _Optional[_Union[ConfigRevised, _Mapping]] = ..., run_reopened: _Optional[_Union[RunReopened, _Mapping]] = ..., run_finished: _Optional[_Union[RunFinished, _Mapping]] = ..., rolled_back: _Optional[_Union[RolledBack, _Mapping]] = ..., plans_withdrawn: _Optional[_Union[PlansWithdrawn, _Mapping]] = ...) -> None: ...

class SequenceShape(_message.Message):
    __slots__ = ("turns", "prompt_length", "num_tokens", "num_trained_tokens")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    num_tokens: int
    num_trained_tokens: int
    def __init__(self, turns: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_trained_tokens: _Optional[int] = ...) -> None: ...

class TrajectoryPlan(_message.Message):
    __slots__ = ("key", "status", "reward", "advantage", "weights", "num_turn_tokens", "oldest_version", "newest_version", "has_logprobs", "sequences", "payload_crcs", "is_masked", "turn_advantages")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CRCS_FIELD_NUMBER: _ClassVar[int]
    IS_MASKED_FIELD_NUMBER: _ClassVar[int]
    TURN_ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    key: TrajectoryKey
    status: str
    reward: float
    advantage: float
    weights: _containers.RepeatedScalarFieldContainer[float]
    num_turn_tokens: int
    oldest_version: int
    newest_version: int
    has_logprobs: bool
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceShape]
    payload_crcs: _containers.RepeatedScalarFieldContainer[int]
    is_masked: bool
    turn_advantages: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, key: _Optional[_Union[TrajectoryKey, _Mapping]] = ..., status: _Optional[str] = ..., reward: _Optional[float] = ..., advantage: _Optional[float] = ..., weights: _Optional[_Iterable[float]] = ..., num_turn_tokens: _Optional[int] = ..., oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., has_logprobs: bool = ..., sequences: _Optional[_Iterable[_Union[SequenceShape, _Mapping]]] = ..., payload_crcs: _Optional[_Iterable[int]] = ..., is_masked: bool = ..., turn_advantages: _Optional[_Iterable[float]] = ...) -> None: ...

class GroupPlan(_message.Message):
    __slots__ = ("group_id", "prompt_uid", "trajectories")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_UID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt_uid: str
    trajectories: _containers.RepeatedCompositeFieldContainer[TrajectoryPlan]
    def __init__(self, group_id: _Optional[str] = ..., prompt_uid: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[TrajectoryPlan, _Mapping]]] = ...) -> None: ...

class Denominators(_message.Message):
    __slots__ = ("num_tokens", "num_sequences", "num_trajectories", "num_groups", "weight_sum", "length_constant")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SUM_FIELD_NUMBER: _ClassVar[int]
    LENGTH_CONSTANT_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_sequences: int
    num_trajectories: int
    num_groups: int
    weight_sum: float
    length_constant: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_trajectories: _Optional[int] = ..., num_groups: _Optional[int] = ..., weight_sum: _Optional[float] = ..., length_constant: _Optional[int] = ...) -> None: ...

class MiniBatchPlan(_message.Message):
    __slots__ = ("first_group", "num_groups", "first_row_id", "num_rows", "width", "response_width", "denominators")
    FIRST_GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DENOMINATORS_FIELD_NUMBER: _ClassVar[int]
    first_group: int
    num_groups: int
    first_row_id: int
    num_rows: int
    width: int
    response_width: int
    denominators: Denominators
    def __init__(self, first_group: _Optional[int] = ..., num_groups: _Optional[int] = ..., first_row_id: _Optional[int] = ..., num_rows: _Optional[int] = ..., width: _Optional[int] = ..., response_width: _Optional[int] = ..., denominators: _Optional[_Union[Denominators, _Mapping]] = ...) -> None: ...

class MetricStatistics(_message.Message):
    __slots__ = ("num_trajectories", "total", "minimum", "maximum")
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    num_trajectories: int
    total: float
    minimum: float
    maximum: float
    def __init__(self, num_trajectories: _Optional[int] = ..., total: _Optional[float] = ..., minimum: _Optional[float] = ..., maximum: _Optional[float] = ...) -> None: ...

class ValueStatistics(_message.Message):
    __slots__ = ("num_trajectories", "num_rewarded", "reward_total")
    NUM_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_REWARDED_FIELD_NUMBER: _ClassVar[int]
    REWARD_TOTAL_FIELD_NUMBER: _ClassVar[int]
    num_trajectories: int
    num_rewarded: int
    reward_total: float
    def __init__(self, num_trajectories: _Optional[int] = ..., num_rewarded: _Optional[int] = ..., reward_total: _Optional[float] = ...) -> None: ...

class TagStatistics(_message.Message):
    __slots__ = ("values", "other")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ValueStatistics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ValueStatistics, _Mapping]] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    values: _containers.MessageMap[str, ValueStatistics]
    other: ValueStatistics
    def __init__(self, values: _Optional[_Mapping[str, ValueStatistics]] = ..., other: _Optional[_Union[ValueStatistics, _Mapping]] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("metrics", "tags", "num_left_out")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MetricStatistics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MetricStatistics, _Mapping]] = ...) -> None: ...
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TagStatistics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TagStatistics, _Mapping]] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.MessageMap[str, MetricStatistics]
    tags: _containers.MessageMap[str, TagStatistics]
    num_left_out: int
    def __init__(self, metrics: _Optional[_Mapping[str, MetricStatistics]] = ..., tags: _Optional[_Mapping[str, TagStatistics]] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run", "step", "revision", "lineage", "previous_hash", "assembly_version", "config_revision", "last_event_id", "groups", "mini_batches", "masked_versions", "figures")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MINI_BATCHES_FIELD_NUMBER: _ClassVar[int]
    MASKED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    revision: int
    lineage: str
    previous_hash: str
    assembly_version: int
    config_revision: int
    last_event_id: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupPlan]
    mini_batches: _containers.RepeatedCompositeFieldContainer[MiniBatchPlan]
    masked_versions: _containers.RepeatedScalarFieldContainer[int]
    figures: Figures
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., revision: _Optional[int] = ..., lineage: _Optional[str] = ..., previous_hash: _Optional[str] = ..., assembly_version: _Optional[int] = ..., config_revision: _Optional[int] = ..., last_event_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupPlan, _Mapping]]] = ..., mini_batches: _Optional[_Iterable[_Union[MiniBatchPlan, _Mapping]]] = ..., masked_versions: _Optional[_Iterable[int]] = ..., figures: _Optional[_Union[Figures, _Mapping]] = ...) -> None: ...
