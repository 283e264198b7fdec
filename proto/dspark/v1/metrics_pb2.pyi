from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("exposition",)
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    exposition: str
    def __init__(self, exposition: _Optional[str] = ...) -> None: ...
