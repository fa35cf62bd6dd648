"""The executor: runs programs, op by op, overlapped on lanes or inline on the caller's thread.

[Note: Two ways to run one program] Overlapped: all ops but the compute ops are queued on their lanes when the program
starts; dependencies hold them back, so they run ahead as far as slots allow. Inline: the caller runs them itself, in
program order, up to the compute op that it has reached. Both obey the same order per lane and the same dependencies,
and each op does the same arithmetic, so both give the same bits.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from headrace.base.errors import StepError
from headrace.base.units import plural
from headrace.executor.completion import Cancelled, Completion
from headrace.executor.interrupts import uninterrupted
from headrace.executor.lanes import COPY_LANES, HOST_LANES, UPDATE_LANES, Job, ThreadLane, run_job
from headrace.executor.trace import Mark, Trace
from headrace.schedule.op import HOME, RESIDENT, Op, Program, kind_of

Notes = dict[Any, Any]
"""What the ops of one walk tell each other: the arrival of a gradient by visit, saved inputs, hyper-parameters."""
Actions = Callable[[Op, Notes], "torch.cuda.Event | None"]


class Executor:
    """Owns the lanes and the tokens. One thread at a time walks (design, law 7)."""

    def __init__(self, device: torch.device, actions: Actions, overlap: bool) -> None:
        self.device, self.overlap, self.closed = device, overlap, False
        self._actions = actions
        self._tokens: dict[str, Completion] = {}
        self._lanes = {name: ThreadLane(name, device) for name in (*HOST_LANES, *COPY_LANES)} if overlap else {}
        self._unwatched: list[Completion] = []
        self.trace: Trace | None = None
        """Takes the times of the ops of programs that start from now on."""
        self._lock = threading.Lock()
        self._walk: Callable[[], Walk | None] = lambda: None
        """The pass that began last, if its ops are still of interest."""
        self.settle: Callable[[], Callable[[], None] | None] = lambda: None
        """What is called before anyone waits, see Stream.settle; weak, since hooks of parameters reach the executor."""
        _OPEN.add(self)
        dropped = weakref.finalize(self, _stop_all, list(self._lanes.values()))
        dropped.atexit = False  # `end` sees to that

    def start(self, program: Program, notes: Notes | None = None) -> Walk:
        """Begin a program. Overlapped: its copies start at once."""
        if self.closed:
            came = f"a {program.name} pass of {plural(len(program.ops), 'op')} came"
            raise StepError("the session of this model is closed", came,
                            "Load the model again and wrap it: its weights went with the session")  # fmt: skip
        with uninterrupted():
            return self._start(program, notes)

    def _start(self, program: Program, notes: Notes | None) -> Walk:
        self.publish("issued")
        walk = Walk(self, program, self._resolve(program), {} if notes is None else notes)
        with self._lock:
            walk.replaced = {t: self._tokens[t] for op in program.ops for t in op.gives if t in self._tokens}
            for op, done in zip(program.ops, walk.done, strict=True):
                self._tokens.update(dict.fromkeys(op.gives, done))
                if op.lane in UPDATE_LANES or op.verb == "WRITE":
                    self._unwatched.append(done)
        if program.compute():
            self._walk = weakref.ref(walk)
        if self.overlap:
            for op in program.ops:
                if op.lane != "compute":
                    self._lanes[op.lane].submit(walk.job(op))
        return walk

    def _resolve(self, program: Program) -> list[tuple[Completion, ...]]:
        """What each op waits for from earlier programs, looked up before this program gives its own tokens."""
        return [tuple(self._tokens[token] for token in op.before if token in self._tokens) for op in program.ops]

    def forget(self, walk: Walk) -> None:
        """Tokens of an abandoned walk stand for the last of its ops that was done, else for what they stood for."""
        last = dict(walk.replaced)
        for op, done in zip(walk.program.ops, walk.done, strict=True):
            if done.error is None:
                last.update(dict.fromkeys(op.gives, done))
        failed = {id(done) for done in walk.done if done.error is not None}
        with self._lock:
            for token in [token for token, done in self._tokens.items() if id(done) in failed]:
                del self._tokens[token]
                if token in last:
                    self._tokens[token] = last[token]

    def forget_errors(self) -> None:
        """Nothing changed by failed work, and its error was raised: later programs need not wait for it."""
        with self._lock:
            self._tokens = {token: done for token, done in self._tokens.items() if done.error is None}
            self._unwatched = [done for done in self._unwatched if done.error is None]

    def publish(self, token: str) -> None:
        """Let `token` stand for all work issued so far on the current compute stream."""
        done = Completion()
        done.finish(self.record())
        with self._lock:
            self._tokens[token] = done

    def record(self) -> torch.cuda.Event | None:
        """An event on the caller's current stream; None without a GPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _settle(self) -> None:
        settle = self.settle()
        if settle is not None:
            settle()

    def wait(self, *tokens: str, on_stream: bool = False) -> None:
        """Wait until the last ops that gave these tokens are done (on the current stream only, if `on_stream`)."""
        self._settle()
        for token in tokens:
            done = self._tokens.get(token)
            if done is not None:
                try:
                    done.wait(self.stream() if on_stream else None)
                except Cancelled:
                    pass

    def drain(self) -> None:
        """Wait until all host work (updates, writes) is done. Raises the first error any of it met."""
        self._settle()
        with self._lock:
            waiting, self._unwatched = self._unwatched, []
        error: BaseException | None = None
        for done in waiting:
            try:
                done.wait()
            except Cancelled:
                pass
            except BaseException as caught:
                error = error or caught
        with self._lock:
            self._unwatched += [done for done in waiting if not done.done]  # an interrupt has ended the wait for it
        if error is not None:
            raise error

    def quiet(self) -> None:
        """Wait until nothing is under way. Raises the first error that is met, and leaves it to whoever else looks."""
        self._settle()
        with self._lock:
            waiting = [*self._unwatched, *self._tokens.values()]
        for done in waiting:
            with contextlib.suppress(Cancelled):
                done.wait()

    def recover(self) -> None:
        """Wait for all work under way, whatever becomes of it, and forget what failed: nothing waits for that again."""
        with uninterrupted():
            for done in [*self._tokens.values(), *self._unwatched]:
                with contextlib.suppress(BaseException):
                    done.wait()
            self.forget_errors()

    def check(self) -> None:
        """Raise the error of host work that has failed meanwhile; forget what is done."""
        with self._lock:
            ended = [done for done in self._unwatched if done.done]
            self._unwatched = [done for done in self._unwatched if not done.done]
        for done in ended:
            if done.error is not None and not isinstance(done.error, Cancelled):
                raise done.error

    def run(self, op: Op, notes: Notes) -> torch.cuda.Event | None:
        return self._actions(op, notes)

    def seconds(self) -> dict[str, float]:
        """Time each lane's thread has spent running ops since the session opened; empty when inline."""
        return {name: lane.seconds for name, lane in self._lanes.items()}

    def close(self) -> None:
        self.closed = True
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._tokens.clear()

    def end(self) -> None:
        """The process ends: nothing new begins, and what runs comes to its end."""
        walk = self._walk()
        if walk is not None:
            walk.abandon()
        self.close()


_OPEN: weakref.WeakSet[Executor] = weakref.WeakSet()


def _stop_all(lanes: list[ThreadLane]) -> None:
    """A model was dropped without close: its threads end too. No join, for a finalizer may run on one of them."""
    for lane in lanes:
        lane.stop()


@atexit.register
def _end_all() -> None:
    """Python kills daemon threads at exit. One that is inside a kernel then would abort the whole process."""
    for executor in list(_OPEN):
        executor.end()


class Walk:
    """One program under way. The compute ops belong to whoever walks: `reach`, compute, `leave`."""

    def __init__(
        self, executor: Executor, program: Program, before: list[tuple[Completion, ...]], notes: Notes
    ) -> None:
        self.program, self.notes = program, notes
        self.done = [Completion() for _ in program.ops]
        self._executor, self._before = executor, before
        self._marks: list[Mark] | None = executor.trace.open(program) if executor.trace is not None else None
        self.replaced: dict[str, Completion] = {}
        """What the program's tokens stood for before it began."""
        self._next = 0
        self._visits = program.compute()
        self.position = 0

    def job(self, op: Op) -> Job:
        waits = tuple(self.done[index] for index in op.after) + self._before[op.index]
        mark = self._marks[op.index] if self._marks is not None else None
        return Job(str(op), lambda: self._executor.run(op, self.notes), waits, self.done[op.index], mark)

    @property
    def expected(self) -> Op | None:
        """The compute op that comes next; None at the end."""
        return self._visits[self.position] if self.position < len(self._visits) else None

    def reach(self) -> Op:
        """Wait until the next compute op may run, and return it."""
        op = self._visits[self.position]
        if not self._executor.overlap:
            self._run_up_to(op.index)
        # Rows that are not on the device are gathered by this thread: an update on the device must be over then.
        stream = None if op.unit < 0 and kind_of(op.source) == HOME else self._executor.stream()
        for completion in [*(self.done[index] for index in op.after), *self._before[op.index]]:
            completion.wait(stream)
        if self._marks is not None:
            self._marks[op.index].begin(self._executor.stream())
        return op

    def leave(self) -> None:
        """The compute op that was reached has been issued; free what it was the last to use."""
        with uninterrupted():
            self._leave(self._visits[self.position])

    def _leave(self, op: Op) -> None:
        if self._marks is not None:
            self._marks[op.index].end(self._executor.stream())
        self.done[op.index].finish(self._executor.record())
        self.position += 1
        if self._executor.overlap:
            for later in self.program.ops[op.index + 1 :]:
                if later.visit >= 0 and later.lane == "compute":
                    break
                if later.verb == "FREE":
                    self._compute(later)
        else:
            self._next = op.index + 1
            self._run_behind()

    def finish(self) -> None:
        """All compute ops are done; overlapped, the rest goes on by itself."""
        if not self._executor.overlap:
            self._run_up_to(len(self.program.ops))

    def abandon(self) -> None:
        """Give the pass up: nothing that was not yet computed runs, and all that runs ends before this returns."""
        cancelled = Cancelled()
        for op in self.program.ops:
            if op.lane == "compute":
                self.done[op.index].fail(cancelled)
        if not self._executor.overlap:
            for op in self.program.ops[self._next :]:
                self.done[op.index].fail(cancelled)
        for op in self.program.ops:
            try:
                self.done[op.index].wait()
            except BaseException:
                pass  # whoever needs this op's work sees its error; here only the end counts
        self._executor.forget(self)

    def _run_behind(self) -> None:
        """Inline: what follows from the compute op that is over, so that it is done also where no other op comes."""
        stop = self._next
        while stop < len(self.program.ops) and not _prepares(self.program.ops[stop]):
            stop += 1
        self._run_up_to(stop)

    def _run_up_to(self, stop: int) -> None:
        while self._next < stop:
            op = self.program.ops[self._next]
            self._next += 1
            if op.verb in ("FORWARD", "BACKWARD"):
                continue
            if op.lane == "compute":
                self._compute(op)
            else:
                # As on lanes, an error reaches whoever needs this op; later ops must end too, or their waiters hang.
                # Ctrl-C reaches this thread alone there, and so it does here: it is no error of the op.
                with uninterrupted():
                    run_job(self.job(op), self._executor.stream(), op.lane in HOST_LANES)

    def _compute(self, op: Op) -> None:
        """A compute op that is no visit, on the caller's thread and stream."""
        stream, mark = self._executor.stream(), self._marks[op.index] if self._marks is not None else None
        if mark is not None:
            mark.begin(stream)
        self._executor.run(op, self.notes)
        if mark is not None:
            mark.end(stream)
        self.done[op.index].finish(self._executor.record())


def _prepares(op: Op) -> bool:
    """Whether an op belongs to the visit that follows it: the visit itself, or what brings its weights and inputs."""
    brings = op.verb in ("READ", "LOAD") and op.region != "state" and kind_of(op.target) != RESIDENT
    return brings or op.verb in ("FORWARD", "BACKWARD")
