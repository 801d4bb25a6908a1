"""Features that producers work out while the drafter trains: copies of the target in processes of a Ray cluster.

Every process of training asks a queue for the rows of the batches that come next, and for no more: they are its
credits. The queue hands the oldest of all rows to whichever producer is free. States go through Ray's object store
from the producer to the process that asked. What is lost with a process is asked for again.

Legend: R tokens of a row, T of a row with its padding, H hidden.
"""

import dataclasses
import itertools
import logging
import os
import socket
import sys
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor, distributed

from specdec.data import Batch, TokenData
from specdec.features.actors import TIMEOUT, Actors, agreed, answers_of, rank
from specdec.features.contract import Contract
from specdec.features.producers import (
    CALLS,
    MAX_IN_FLIGHT,
    NAMESPACE,
    POLL,
    Producer,
    RowQueue,
    Tee,
    unpack,
)
from specdec.features.producing import ProducedFeatures
from specdec.features.runners import EngineName, EngineSetup
from specdec.features.source import (
    FeatureSource,
    RowSource,
    spot_check,
    stored_boundaries,
)
from specdec.features.store import PackedRow, each_row
from specdec.target import Target, TargetOutput, TargetSource
from specdec.utils.cluster import AUTH, join, last_line
from specdec.utils.numbers import Side
from specdec.utils.text import how_many
from specdec.utils.vllm import VARIABLE

log = logging.getLogger(__name__)
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Streamed(ProducedFeatures):
    """The target runs in separate processes, on this machine or on others of a Ray cluster, a few batches ahead.

    A row's states are those of ``OnTheFly(rows=1)`` to the last bit where a producer runs on the same hardware with as
    many threads. A producer or the queue that dies is started again, and its rows are made again.

    Args:
        engine: what runs it: transformers, or vLLM, of the Python that $SPECDEC_VLLM_PYTHON names.
        vllm_args: more of vLLM's engine, as ``{tensor_parallel_size: 4}``.
        rows: that a producer takes at once; transformers reads them in one forward.
        tee: a directory where the rows are stored, too, as specdec cache does; that command with this ``--out``, and
            dtype, engine and rows as here, makes the rows that training did not draw.
    """

    engine: EngineName = "transformers"
    vllm_args: dict[str, Any] = field(default_factory=dict)
    rows: Side = 1
    tee: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_args and self.engine != "vllm":
            raise ValueError("model.features.vllm_args needs model.features.engine=vllm")

    @property
    def stored_in(self) -> str | None:
        return self.tee

    @property
    def rows_at_once(self) -> int:
        return self.rows

    def setup_of(self, source: TargetSource, data: TokenData) -> EngineSetup:
        """What a producer runs the target with, whatever the data."""
        return EngineSetup(self.engine, source, self.rows, self.vllm_args)

    def open(
        self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool
    ) -> FeatureSource:
        """Start the producers, and compare one of their rows with the target where it is whole.

        Raises:
            ValueError: Ray is not there, or has no room for them; or they have another target or other numbers.
        """
        return StreamedSource(self, target, data, layers, final_norm)


class StreamedSource(RowSource):
    """Asks the queue for rows ahead, and takes them; ValueError as :class:`RowSource` and :meth:`Streamed.open`."""

    producer_kind: ClassVar[type] = Producer
    queue_kind: ClassVar[type] = RowQueue

    def __init__(
        self,
        features: ProducedFeatures,
        target: Target,
        data: TokenData,
        layers: Sequence[int],
        final_norm: bool,
    ) -> None:
        self.features = features
        self.target = target
        self.data = data
        # batches' numbers, and answers
        self._asked: defaultdict[bytes, deque[tuple[int, Any]]] = defaultdict(deque)
        self._lock = threading.Lock()  # of these: the thread takes what the loader asks for
        self._batches = itertools.count()
        self._stop = threading.Event()
        if distributed.is_initialized() and features.address is None:
            machines: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(machines, socket.gethostname())
            if len(names := sorted(set(machines))) > 1:
                raise ValueError(
                    f"training runs on {' and '.join(names)}, and producers without model.features.address "
                    "on one machine: ray start --head on one, ray start --address HEAD:6379 on the others, and "
                    "model.features.address=auto"
                )
        stored = stored_boundaries(target, layers, final_norm)
        contract = Contract.of(target, data, stored, features.dtype, engine="")
        self._start(contract)
        try:
            contract = self._ray.get(self._queue.about.remote())
            super().__init__(contract, "the producers", target, layers, final_norm, features.ahead)
            self._begin()
            if target.whole:
                agreed(self._check)
        except BaseException:
            self._end()
            raise

    def _begin(self) -> None:
        """Do what comes before the first row is compared with the target; of all processes."""

    def _start(self, contract: Contract) -> None:
        """Start producers and queue in the first process, and join them from all."""
        # to shut down
        self._ours = not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
        try:
            address, name, environment = agreed(lambda: self._start_actors(contract))
            os.environ.update(environment)
            self._ray = join(address, NAMESPACE)
            self._queue = self._ray.get_actor(name, NAMESPACE)
        except BaseException:
            self._end()
            raise
        self._stop.clear()

    def _start_again(self) -> None:
        """If it was closed: in all processes at once, also where one has no row."""
        if self._queue is None:
            self._start(self.contract)

    def _start_actors(self, contract: Contract) -> tuple[str, str, dict[str, str]]:
        """Return where the cluster is, the queue's name in it, and variables that others need to join."""
        features = self.features
        ray = join(features.address, NAMESPACE)
        features.check_room(ray)
        if self.target.origin is None:
            raise ValueError(
                "producers need a target that they can load: give its directory or Hub id"
            )
        actors = Actors(ray, uuid.uuid4().hex[:8])
        longest, keys = self._rows_to_make()
        names = [f"producer-{number}" for number in range(features.producers)]
        source = self._source_of_producers(self.target.origin)
        setup = features.setup_of(source, self.data)
        options = self._producer_options()
        folder = None if features.address else os.getcwd()
        producers = [
            actors.start_actor(
                self.producer_kind, name, setup, contract, longest, folder, **options
            )
            for name in names
        ]
        log.info(
            "waiting for %s of %s", how_many(features.producers, "producer"), self.target.source
        )
        identity, engine = self._agreed_identity(producers)
        contract = dataclasses.replace(contract, target=identity, engine=engine)
        beside = {
            "num_cpus": 0,
            "max_task_retries": -1,
            "scheduling_strategy": actors.on_this_node(),
        }
        tee = None
        if features.stored_in is not None:
            tee = actors.full_name("tee")
            place = os.path.abspath(features.stored_in)
            self._tee = actors.start_actor(Tee, "tee", place, contract, **beside)
            self._tee_keys = keys
            log.info("waiting for %s, which no other process may be writing", place)
            answers_of([self._tee], "known", "model.features.tee")
        producer_names = list(map(actors.full_name, names))
        queue_arguments = contract, producer_names, features.rows_at_once, tee
        queue = actors.start_actor(
            self.queue_kind, "queue", *queue_arguments, max_concurrency=CALLS, **beside
        )
        ray.get(queue.about.remote())
        self._handles = (*producers, queue)  # they end with their handles
        log.info("%s: %s", how_many(features.producers, "producer"), engine)
        joining = {AUTH: os.environ[AUTH]} if AUTH in os.environ else {}
        address = features.address or ray.get_runtime_context().gcs_address
        return address, actors.full_name("queue"), joining

    def _rows_to_make(self) -> tuple[int, set[bytes]]:
        """Return the longest document's tokens, and the keys of the rows that a tee is to have."""
        longest = 0
        keys = set()
        for row in itertools.chain(*map(each_row, self.data.splits)):
            longest = max([longest, *map(len, row.pieces())])
            if row.tokens and self.features.stored_in is not None:
                keys.add(row.key)
        return longest, keys

    def _source_of_producers(self, origin: TargetSource) -> TargetSource:
        """Return the target as producers load it: whole, and by absolute paths where they run elsewhere."""
        source = dataclasses.replace(origin, parts=False)
        if self.features.address:
            for name in ("source", "adapter"):
                path = getattr(source, name)
                if path and os.path.exists(path):
                    source = dataclasses.replace(source, **{name: os.path.abspath(path)})
        return source

    def _producer_options(self) -> dict[str, Any]:
        """Return Ray's options of a producer."""
        features = self.features
        variables = {"OMP_NUM_THREADS": str(features.cpus), "MKL_NUM_THREADS": str(features.cpus)}
        if VARIABLE in os.environ and not features.address:
            variables[VARIABLE] = os.environ[VARIABLE]
        return {
            "num_cpus": features.cpus,
            "num_gpus": features.gpus,
            "runtime_env": {"env_vars": variables},
            # its calls are not tried again: a row that is lost goes to the one that is free first
            "max_concurrency": MAX_IN_FLIGHT + 1,
        }

    def _agreed_identity(self, producers: Sequence[Any]) -> tuple[dict[str, Any], str]:
        """Return the target's identity and the engine, of which all producers must have the same."""
        answers = answers_of(producers, "about", "a producer cannot start")
        identity, engine = answers[0]
        for producer_identity, producer_engine in answers:
            if not self.target.is_of(producer_identity):
                raise ValueError(
                    f"a producer has another target, {producer_identity['source']}, or other weights or another "
                    "tokenizer of it"
                )
            if producer_engine != engine:
                raise ValueError(
                    f"producers run {engine} and {producer_engine}: install one version on all machines"
                )
        return identity, engine

    def _check(self) -> None:
        """Compare one of their rows with the target."""
        row = next(row for row in each_row(self.data.splits.validation) if row.tokens)
        columns = self.contract.empty(row.tokens)
        self.copy(row, *columns)
        spot_check(self.contract, self.where, columns, self.target, row)

    def prefetch(self, batch: Batch) -> None:
        """Ask for its rows, and have the thread take them as they come."""
        self._start_again()
        number = next(self._batches)
        for row in each_row(batch):
            if row.tokens:
                with self._lock:
                    self._asked[row.key].append((number, self._ask(row, number)))
        super().prefetch(batch)

    def cancel(self, batch: Batch) -> None:
        """Let go of its rows, and make those that are not begun no more."""
        super().cancel(batch)
        for row in each_row(batch):
            with self._lock:
                if asked := self._asked.get(row.key):
                    self._ray.cancel(asked.pop()[1], recursive=False)

    def __call__(
        self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool
    ) -> TargetOutput:
        """The states of every row."""
        self._start_again()
        return super().__call__(target, batch, layers, final_norm)

    def copy(self, row: PackedRow, *columns_T: Tensor) -> None:
        with self._lock:
            asked = self._asked.get(row.key)
            number, call = asked.popleft() if asked else (next(self._batches), None)
            if not asked:
                self._asked.pop(row.key, None)

        def write(answer: list[Any]) -> None:
            unpack(self.contract, self._wait(answer[0]), row, columns_T)

        self._result(call, lambda: self._ask(row, number), write)

    def _result(self, call: Any, ask: Callable[[], Any], fetch: Callable[[Any], Value]) -> Value:
        """Return what ``fetch`` makes of a call's answer; where who made or kept it has died, ask again.

        Args:
            call: to the queue; None to ask first.
        """
        errors = self._ray.exceptions
        while True:
            call = ask() if call is None else call
            try:
                answer = self._wait(call)
                if isinstance(answer, str):
                    raise ValueError(f"a producer of features failed: {answer}")
                return fetch(answer)
            except errors.RayTaskError:
                raise
            except errors.RayError as error:
                log.warning("features are lost, and are made again: %s", type(error).__name__)
                call = None  # at the place that it had

    def _ask(self, row: PackedRow, batch: int) -> Any:
        return self._queue.features_of.remote(batch, row)

    def _wait(self, reference: Any) -> Any:
        """What it stands for, unless the source is closed meanwhile."""
        waited = 0.0
        while not self._stop.is_set():
            if self._ray.wait([reference], timeout=POLL)[0]:
                return self._ray.get(reference)
            if (waited := waited + POLL) % TIMEOUT == 0:
                log.warning(
                    "waiting for features since %.0f s: the producers are starting, or too slow",
                    waited,
                )
        raise ValueError("the features are closed")

    def close(self, failed: bool = False) -> None:
        """End producers, queue and what was asked for; a new batch starts them again."""
        if self._queue is None:
            return
        self._stop.set()
        super().close()
        self._asked.clear()
        if distributed.is_initialized() and not failed:
            distributed.barrier()  # nobody needs them any more
        try:
            if rank() == 0:
                self._log_totals()
        except self._ray.exceptions.RayError as error:
            log.warning("streamed features: %s", last_line(error))
        finally:
            self._end()

    def _end(self) -> None:
        """Producers and queue end with their handles, and the cluster if this process started it."""
        self._queue = None
        self._handles = ()
        if self._ours and "ray" in sys.modules:
            sys.modules["ray"].shutdown()

    def _log_totals(self) -> None:
        """Log what was done, and complete what the tee has."""
        counts = self._ray.get(self._queue.counts.remote())
        log.info(
            "streamed %s, %d of them begun again", how_many(counts["done"], "row"), counts["again"]
        )
        if self.features.stored_in is not None:
            missing = self._ray.get(self._tee.finish.remote(self._tee_keys))
            self._ray.kill(self._tee)  # which lets go of the folder
            state = "complete"
            if missing:
                state = f"{how_many(missing, 'row')} missing, which specdec cache makes"
            log.info("%s: %s", self.features.stored_in, state)
