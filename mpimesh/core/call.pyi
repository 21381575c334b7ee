from collections.abc import Sequence
from types import CodeType
from typing import Any, Generic, TypeAlias

from numpy.typing import NDArray
from typing_extensions import TypeVar

from mpimesh.core.node import Bound

T_co = TypeVar("T_co", covariant=True, default=Any)

Site: TypeAlias = tuple[CodeType, int]

OWN: tuple[str, ...]

def call_site() -> Site: ...

class CallRecord:
    name: str
    group: str
    rule: str
    shape: Any
    dtype: object
    label: str | None
    compared: object
    peers: tuple[int, ...] | None
    site: Site
    hint: str
    signatures: Any
    number: int
    record: int
    word: int
    ended: bool
    planned: bool

class Board:
    apart: int
    open: bool
    def __init__(self, place: int, boards: Sequence[NDArray[Any]], slots: int) -> None: ...
    def post(self, number: int, digest: int) -> int: ...
    def agrees(self, number: int, word: int) -> bool: ...
    def found(self, place: int, number: int) -> None: ...

class Counter:
    started: int

class Ring:
    def __init__(self, memory: NDArray[Any], slots: int) -> None: ...
    @property
    def started(self) -> int: ...
    def write(self, number: int, nbytes: int, text: bytes) -> int: ...
    def end(self, call: CallRecord, failed: bool) -> None: ...
    def text_of(self, group: Any, call: Any) -> bytes: ...

class State:
    recorder: Any
    calls: Any
    tails: dict[Any, Any]

class OpenWork:
    def __len__(self) -> int: ...
    def all(self) -> list[Any]: ...

class Handle(Generic[T_co]):
    _group: Any
    _request: Any
    _finish: Any
    _unlock: Any
    _value: Any
    _prepared: Any
    _operand: Any
    _scope: Any
    _event: Any
    _error: BaseException | None
    _call: Any
    _resolved: bool
    _interrupted: bool
    def _begin(self) -> None: ...
    def _end(self, failed: bool) -> None: ...
    def resolve(self, timeout_s: float | None = None) -> T_co: ...

class Direct:
    busy: bool
    def __init__(
        self,
        call: CallRecord,
        bound: Bound,
        digest: int,
        counter: Counter,
        nbytes: int,
        shape: tuple[int, ...] | None = None,
        in_place: bool = False,
        value: Any = None,
    ) -> None: ...

class Caller:
    closed: bool
    def __init__(
        self, core: Any, communicator: Any, handle: type[Any], call: type[Any]
    ) -> None: ...
    def run(
        self, make: Any, x: Any, out: Any, label: str | None, options: tuple[Any, ...]
    ) -> Any: ...
    def barrier(self) -> Any: ...
    def again(self, planned: Direct) -> Any: ...
