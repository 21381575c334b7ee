from collections.abc import Callable
from types import CodeType
from typing import Any, Generic, TypeAlias

from numpy.typing import NDArray
from typing_extensions import TypeVar

from mpimesh.core.mail import Message
from mpimesh.core.node import Boxes, Operation

T_co = TypeVar("T_co", covariant=True, default=Any)
H = TypeVar("H")

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
    posted: Operation | None
    number: int
    record: int
    ended: bool
    planned: bool

class Counter:
    started: int

class Ledger(Counter):
    communicator: Any
    mesh: str
    name: str
    ranks: tuple[int, ...]
    mail: Any
    unread: int
    roll_calls: int
    def __init__(
        self,
        communicator: Any,
        mesh: str = "",
        name: str = "",
        ranks: tuple[int, ...] = (),
        mail: Any = None,
    ) -> None: ...

class Limits:
    budgets: tuple[Any, ...]

class Ring:
    def __init__(self, memory: NDArray[Any], slots: int) -> None: ...
    @property
    def started(self) -> int: ...
    def write(self, number: int, nbytes: int, text: bytes) -> int: ...
    def end(self, call: CallRecord, failed: bool) -> None: ...
    def text_of(self, group: Any, call: Any) -> bytes: ...

class State:
    recorder: Any
    tails: dict[Any, Any]
    @property
    def calls(self) -> list[Any]: ...
    def note(self, call: CallRecord) -> None: ...

class OpenWork:
    closed: bool
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
    def __init__(
        self,
        group: Any,
        call: CallRecord,
        request: Any,
        finish: Callable[[], Any] | None = None,
        unlock: Callable[[], None] | None = None,
        value: Any = None,
        scope: Any = None,
        operand: Any = None,
        nbytes: int = 0,
    ) -> None: ...
    def _give(self, value: Any) -> Any: ...
    def _compared(self) -> Operation | None: ...
    def _end(self, failed: bool) -> None: ...
    def resolve(self, timeout_s: float | None = None) -> T_co: ...

class PlanRecord:
    name: str
    rule: str
    compared: object
    kind: object
    shape_in: tuple[int, ...]
    shape: tuple[int, ...] | None
    receives: Any
    also: Any
    tally: Any
    nbytes: int
    digest: int
    in_place: bool
    unequal: bool
    def __init__(self, nbytes: int = 0, receives: Any = None, unequal: bool = False) -> None: ...

class Prepared:
    plan: PlanRecord
    begin: Callable[[], Any]
    value: Any
    finish: Callable[[], Any] | None
    scope: Any
    arguments: tuple[Any, ...]
    after: Callable[[Any], Any] | None
    busy: bool
    def __init__(
        self,
        plan: PlanRecord,
        begin: Callable[[], Any],
        value: Any = None,
        finish: Callable[[], Any] | None = None,
        scope: Any = None,
        arguments: tuple[Any, ...] = (),
    ) -> None: ...

class Starter(Generic[H]):
    name: str
    context: Any
    progress: Any
    ledger: Any
    open_work: Any
    checked: bool
    @property
    def rank(self) -> int | None: ...
    def __init__(
        self,
        name: str,
        ledger: Ledger | None,
        context: Any,
        handle: type[H],
        call: type[Any],
        digest: Callable[..., int],
    ) -> None: ...
    def run(
        self, make: Any, x: Any, out: Any, label: str | None, options: tuple[Any, ...]
    ) -> H: ...
    def scatter(
        self, make: Any, x: Any, out: Any, label: str | None, options: tuple[Any, ...]
    ) -> H | None: ...
    def exchange(
        self, plan: PlanRecord, boxes: Boxes, source: Any, target: Any, value: Any
    ) -> H | None: ...
    def barrier(self, label: str | None) -> H: ...
    def submit(self, call: CallRecord, prepared: Prepared, lock: Any = None) -> H: ...
    def begin(self, call: CallRecord, prepared: Prepared) -> Any: ...
    def post(self, call: CallRecord, plan: PlanRecord) -> bool: ...
    def again(self, call: CallRecord, prepared: Prepared) -> H | None: ...

class Route(PlanRecord):
    description: bytes
    head: int
    expected_head: int
    guess: tuple[tuple[int, ...], Any] | None
    @property
    def dest(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def wire_tag(self) -> int: ...
    def __init__(
        self, call: CallRecord, wire_tag: int, dest: int = -1, source: int = -1
    ) -> None: ...
    def take(self, message: Message) -> None: ...

class Courier:
    def __init__(self, starter: Starter[Any]) -> None: ...
    def keep(self, route: Route, like: NDArray[Any] | None, options: tuple[Any, ...]) -> None: ...
    def send(self, x: Any, dest: Any, tag: Any) -> Any: ...
    def receive(self, source: Any, out: Any, tag: Any) -> Any: ...
    def shift(self, x: Any, offset: Any, wrap: Any) -> Any: ...
    def start(
        self, route: Route, call: CallRecord, x: NDArray[Any] | None, room: NDArray[Any] | None
    ) -> Any: ...
