"""``run`` and ``World``: call a function on n ranks and get the results by rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from course_lib.launch import arguments, faults, joined
from course_lib.launch.limits import Limits
from course_lib.launch.local import new_environ, start_ranks
from course_lib.launch.output import RankOutput
from course_lib.launch.places import cell_names
from course_lib.launch.ranks import Ranks
from course_lib.launch.supervise import Run
from course_lib.launch.task import Outcome, Task
from course_lib.launch.travel import pack_call, unpack
from course_lib.ledger import Ledger
from course_lib.mesh import Links, Pace
from course_lib.trace import SentBytes, Trace, traffic_matrices


class Results(list):
    """The results by rank, with each rank's ledger, trace and output (its last 1 MB).

    ``kernel_bytes["tp"][0][1]`` are the bytes that rank 0 sent to rank 1 on axis tp while the
    function ran, as the kernel counted them (gloo's headers included); axis "world" has all that
    was sent on no axis of a mesh. ``kernel_bytes`` is None where the kernel has no such count
    (macOS, nccl) or a rank destroyed its groups.
    """

    def __init__(self, values: Iterable[Any], outcomes: Sequence[Outcome], outputs: list[str]):
        super().__init__(values)
        self.ledgers: list[Ledger] = [outcome.ledger or Ledger() for outcome in outcomes]
        self.traces: list[Trace] = [outcome.trace or Trace() for outcome in outcomes]
        self.kernel_bytes = traffic_matrices(outcome.sent or SentBytes() for outcome in outcomes)
        self.outputs = outputs


def run(
    fn: Callable,
    *args: Any,
    n: int = 4,
    timeout: float = 60,
    pace: Pace | None = None,
    links: Links | None = None,
    checked: bool = False,
    init: bool = True,
    device: str | None = None,
    limits: Limits | None = None,
) -> Results:
    """Call ``fn(*args)`` on ``n`` fresh ranks and return the results by rank.

    ``fn`` may be defined in a notebook cell and use the notebook's variables, because it is sent
    by value. ``timeout`` is in seconds. ``pace`` gives operations, or an operation of one stage, a
    fixed time. ``links`` slows communication down. ``checked`` compares every collective across
    the ranks before the call is made. The default group is initialized (gloo; nccl with
    ``device="cuda"``, one GPU per rank). With ``init=False`` only RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and a free MASTER_PORT are set. ``limits`` replace the timeout; they do not depend
    on how busy the machine is.

    Calls of torch.manual_seed or torch.set_default_dtype in the notebook do not reach the ranks:
    make them in ``fn``. If ``fn`` is from one of your files, the ranks get the version that was
    imported here, but they import the modules that it uses from their files. After an edit, call
    importlib.reload on its module. Tensors that share memory are sent and returned as copies that
    do not share memory.

    Raises :class:`~course_lib.launch.faults.RankError` when a rank fails, dies or misses the
    deadline; the error names the rank at fault and the place of every other rank. Raises
    RuntimeError inside a rank.
    """
    with World(n, timeout=timeout, init=init, device=device) as world:
        return world.run(fn, *args, pace=pace, links=links, checked=checked, limits=limits)


class World:
    """``n`` ranks that live from run to run: about 5 ms per run instead of 100.

    Values that a function stores in a module survive the run; groups that it made are released
    when the next run begins. Runs from several threads are made one after another. After a
    failure the ranks are killed, and the next run starts fresh ones. The keyword arguments are
    the same as for :func:`run`; ``timeout``, ``pace``, ``links`` and ``checked`` may also be given
    to each run.
    """

    def __init__(
        self,
        n: int = 4,
        *,
        timeout: float = 60,
        pace: Pace | None = None,
        links: Links | None = None,
        checked: bool = False,
        init: bool = True,
        device: str | None = None,
    ) -> None:
        arguments.check_world(n, timeout, device, init)
        self.n = int(n)
        self.timeout = timeout
        self.conditions = arguments.conditions(pace or {}, links, checked)
        self.init = init
        self.device = device
        self._turn = threading.RLock()  # a rank does one run at a time
        self._ranks: Ranks | None = None
        self._outputs: list[RankOutput] = []
        self._runs = 0

    def run(
        self,
        fn: Callable,
        *args: Any,
        timeout: float | None = None,
        pace: Pace | None = None,
        links: Links | None = None,
        checked: bool | None = None,
        limits: Limits | None = None,
    ) -> Results:
        """Call ``fn(*args)`` on every rank. The defaults are the arguments of the World."""
        timeout = self.timeout if timeout is None else timeout
        arguments.check_call(fn, timeout)
        conditions = arguments.conditions(
            self.conditions.pace if pace is None else pace,
            self.conditions.links if links is None else links,
            self.conditions.checked if checked is None else checked,
        )
        arguments.check_directory()
        task = Task(b"", conditions, self.device or "cpu", self.init, self.n, cell_names())
        with self._turn:
            if (world := joined.joined_world()) is not None:
                outcomes = world.call(fn, args, task, limits.total if limits else timeout)
            else:
                if self.device == "cuda":
                    arguments.check_cards(self.n)
                task.call = pack_call(fn, args)
                outcomes = self._call(task, timeout, limits)
            return Results(_values(outcomes), outcomes, self._texts())

    def _call(self, task: Task, timeout: float, limits: Limits | None) -> list[Outcome]:
        try:
            if self._ranks is None:
                self._ranks = start_ranks(self.n)
                files = map(self._ranks.file, range(self.n))
                self._outputs = [RankOutput(rank, file) for rank, file in enumerate(files)]
            for output in self._outputs:
                output.begin()
            task.environ = new_environ()
            self._runs += 1
            task.run = self._runs
            return Run(self._ranks, self._outputs).call(task, timeout, limits)
        except BaseException as error:
            self.close()
            if isinstance(error, faults.RankError):
                error.outputs = self._texts()
            raise

    def _texts(self) -> list[str]:
        return [output.text() for output in self._outputs] or [""] * self.n

    def close(self) -> None:
        """End the ranks after the current run, if there is one. A later run starts fresh ranks."""
        with self._turn:
            if self._ranks is not None:
                self._ranks.close()
                self._ranks = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _values(outcomes: Sequence[Outcome]) -> list[Any]:
    values = []
    for rank, outcome in enumerate(outcomes):
        try:
            values.append(unpack(outcome.value))
        except Exception as error:
            raise faults.unreadable(rank, error) from error
    return values
