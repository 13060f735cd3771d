from shoal.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperatorSet(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATOR_SET_UNSPECIFIED: _ClassVar[OperatorSet]
    FULL: _ClassVar[OperatorSet]
    CORE: _ClassVar[OperatorSet]
OPERATOR_SET_UNSPECIFIED: OperatorSet
FULL: OperatorSet
CORE: OperatorSet

class Graph(_message.Message):
    __slots__ = ("version", "inputs", "parameters", "buffers", "operators", "loss", "weight", "metrics", "operator_set", "batch", "starts", "state")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_SET_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    inputs: _containers.RepeatedCompositeFieldContainer[GraphInput]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    operators: _containers.RepeatedCompositeFieldContainer[Operator]
    loss: str
    weight: str
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    operator_set: OperatorSet
    batch: int
    starts: _containers.RepeatedScalarFieldContainer[int]
    state: _containers.RepeatedCompositeFieldContainer[StateEntry]
    def __init__(self, version: _Optional[int] = ..., inputs: _Optional[_Iterable[_Union[GraphInput, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., operators: _Optional[_Iterable[_Union[Operator, _Mapping]]] = ..., loss: _Optional[str] = ..., weight: _Optional[str] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., operator_set: _Optional[_Union[OperatorSet, str]] = ..., batch: _Optional[int] = ..., starts: _Optional[_Iterable[int]] = ..., state: _Optional[_Iterable[_Union[StateEntry, _Mapping]]] = ...) -> None: ...

class GraphInput(_message.Message):
    __slots__ = ("name", "spec")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: _common_pb2.TensorSpec
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.TensorSpec, _Mapping]] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("name", "spec", "trainable", "tied")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    TIED_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: _common_pb2.TensorSpec
    trainable: bool
    tied: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.TensorSpec, _Mapping]] = ..., trainable: _Optional[bool] = ..., tied: _Optional[_Iterable[str]] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "spec", "persistent", "update")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: _common_pb2.TensorSpec
    persistent: bool
    update: BufferUpdate
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.TensorSpec, _Mapping]] = ..., persistent: _Optional[bool] = ..., update: _Optional[_Union[BufferUpdate, _Mapping]] = ...) -> None: ...

class StateEntry(_message.Message):
    __slots__ = ("name", "tensor", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensor: str
    dtype: _common_pb2.DType
    def __init__(self, name: _Optional[str] = ..., tensor: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ...) -> None: ...

class BufferUpdate(_message.Message):
    __slots__ = ("rule", "value", "factor")
    class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RULE_UNSPECIFIED: _ClassVar[BufferUpdate.Rule]
        EMA: _ClassVar[BufferUpdate.Rule]
        ADD: _ClassVar[BufferUpdate.Rule]
    RULE_UNSPECIFIED: BufferUpdate.Rule
    EMA: BufferUpdate.Rule
    ADD: BufferUpdate.Rule
    RULE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    rule: BufferUpdate.Rule
    value: str
    factor: float
    def __init__(self, rule: _Optional[_Union[BufferUpdate.Rule, str]] = ..., value: _Optional[str] = ..., factor: _Optional[float] = ...) -> None: ...

class Operator(_message.Message):
    __slots__ = ("name", "target", "args", "kwargs", "outputs", "returns_tuple", "module")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_TUPLE_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: str
    args: _containers.RepeatedCompositeFieldContainer[Argument]
    kwargs: _containers.RepeatedCompositeFieldContainer[NamedArgument]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    returns_tuple: bool
    module: str
    def __init__(self, name: _Optional[str] = ..., target: _Optional[str] = ..., args: _Optional[_Iterable[_Union[Argument, _Mapping]]] = ..., kwargs: _Optional[_Iterable[_Union[NamedArgument, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., returns_tuple: _Optional[bool] = ..., module: _Optional[str] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("spec", "grad")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GRAD_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.TensorSpec
    grad: bool
    def __init__(self, spec: _Optional[_Union[_common_pb2.TensorSpec, _Mapping]] = ..., grad: _Optional[bool] = ...) -> None: ...

class NamedArgument(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Argument
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Argument, _Mapping]] = ...) -> None: ...

class Argument(_message.Message):
    __slots__ = ("none", "boolean", "integer", "real", "text", "value", "size", "dtype", "memory_format", "device", "list")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    none: bool
    boolean: bool
    integer: int
    real: float
    text: str
    value: str
    size: _common_pb2.Size
    dtype: _common_pb2.DType
    memory_format: str
    device: bool
    list: ArgumentList
    def __init__(self, none: _Optional[bool] = ..., boolean: _Optional[bool] = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., value: _Optional[str] = ..., size: _Optional[_Union[_common_pb2.Size, _Mapping]] = ..., dtype: _Optional[_Union[_common_pb2.DType, str]] = ..., memory_format: _Optional[str] = ..., device: _Optional[bool] = ..., list: _Optional[_Union[ArgumentList, _Mapping]] = ...) -> None: ...

class ArgumentList(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Argument]
    def __init__(self, items: _Optional[_Iterable[_Union[Argument, _Mapping]]] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
