"""Features that producers work out while the drafter trains: copies of the target in processes of a Ray cluster.

Every process of training asks the ledger for the rows of the batches that come next, and for no more: they are its
credits. The ledger lends the oldest of all rows to whichever producer is free. States go through Ray's object store
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
from typing import Any, TypeVar

from torch import Tensor, distributed

from specdec.data import Batch, TokenData
from specdec.features.producers import CALLS, LEASES, NAMESPACE, POLL, Ledger, Producer, Tee, unpack
from specdec.features.runners import EngineName
from specdec.features.source import Features, FeatureSource, RowSource, boundaries, spot_check
from specdec.features.store import DTYPES, Contract, PackedRow, each_row, packed_rows
from specdec.target import Target, TargetOutput
from specdec.utils.cluster import AUTH, join, last_line
from specdec.utils.numbers import Count, NonNegative, Side, check_numbers
from specdec.utils.text import how_many
from specdec.utils.vllm import VARIABLE

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds without features, or without producers, between two lines of the log
Made = TypeVar("Made")


@dataclass(frozen=True)
class Streamed(Features):
    """The target runs in processes of its own, on this machine or on others of a Ray cluster, a few batches ahead.

    A row's states are those of ``OnTheFly(rows=1)`` to the last bit where a producer runs on the same hardware with as
    many threads. A producer or the ledger that dies is started again, and its rows are made again.

    Args:
        producers: copies of the target.
        engine: what runs it: transformers, or vLLM, of the Python that $SPECDEC_VLLM_PYTHON names.
        vllm_args: more of vLLM's engine, as ``{tensor_parallel_size: 4}``.
        ahead: batches that a process of training has asked for beyond the one it trains on. They bound the memory of
            its machine: ``ahead + 1`` batches' states at a time.
        rows: that a producer takes at once; transformers reads them in one forward.
        dtype: of the states on their way: ``target``, float32, bfloat16, float16, or float8_e4m3fn, which has a scale
            for every token's state and takes half of bfloat16's bytes.
        cpus: of each producer, which are its threads too.
        gpus: of each producer.
        address: of a Ray cluster that runs (``auto``, ``HOST:6379``); None starts one on this machine.
        tee: a directory where the rows are stored, too, as specdec cache does; that command with this ``--out``, and
            dtype, engine and rows as here, makes the rows that training did not draw.
    """

    made_ahead = True
    producers: Side = 1
    engine: EngineName = "transformers"
    vllm_args: dict[str, Any] = field(default_factory=dict)
    ahead: Side = 4
    rows: Side = 1
    dtype: str = "target"
    cpus: Count = 1
    gpus: NonNegative = 0.0
    address: str | None = None
    tee: str | None = None

    def __post_init__(self) -> None:
        check_numbers(Streamed, vars(self), "model.features.")
        if self.dtype != "target" and self.dtype not in DTYPES:
            raise ValueError(
                f"model.features.dtype={self.dtype}: choose target or one of {', '.join(DTYPES)}"
            )
        if self.vllm_args and self.engine != "vllm":
            raise ValueError("model.features.vllm_args needs model.features.engine=vllm")
        if self.gpus and not self.address:
            raise ValueError(
                "model.features.gpus needs model.features.address: of the GPUs that training leaves free make a "
                "cluster, CUDA_VISIBLE_DEVICES=4,5,6,7 ray start --head, and name it: auto"
            )

    def open(
        self, target: Target, data: TokenData, layers: Sequence[int], final_norm: bool
    ) -> FeatureSource:
        """Start the producers, and compare one row of theirs with the target where it is whole.

        Raises:
            ValueError: Ray is not there, or has no room for them; or they have another target or other numbers.
        """
        return StreamedSource(self, target, data, layers, final_norm)


class StreamedSource(RowSource):
    """Asks the ledger for rows ahead, and takes them; ValueError as :class:`RowSource` and :meth:`Streamed.open`."""

    def __init__(
        self,
        features: Streamed,
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
                    f"training runs on {' and '.join(names)}, and features Streamed without model.features.address "
                    "on one machine: ray start --head on one, ray start --address HEAD:6379 on the others, and "
                    "model.features.address=auto"
                )
        stored = boundaries(target, layers, final_norm)
        contract = Contract.of(target, data, stored, features.dtype, features.engine)
        self._start(contract)
        try:
            found = self._ray.get(self._ledger.about.remote())
            super().__init__(found, "the producers", target, layers, final_norm, features.ahead)
            if target.whole:
                agreed(self._check)
        except BaseException:
            self._end()
            raise

    def _start(self, contract: Contract) -> None:
        """Start producers and ledger in the first process, and join them from all."""
        # to shut down
        self._ours = not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
        try:
            address, name, environment = agreed(lambda: self._employ(contract))
            os.environ.update(environment)
            self._ray = join(address, NAMESPACE)
            self._ledger = self._ray.get_actor(name, NAMESPACE)
        except BaseException:
            self._end()
            raise
        self._stop.clear()

    def _start_again(self) -> None:
        """If it was closed: in all processes at once, also where one has no row."""
        if self._ledger is None:
            self._start(self.contract)

    def _employ(self, contract: Contract) -> tuple[str, str, dict[str, str]]:
        """Where the cluster is, the ledger's name in it, and variables that others need to join."""
        one = self.features
        target = self.target
        run = uuid.uuid4().hex[:8]
        ray = join(one.address, NAMESPACE)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for kind, each in (("CPU", one.cpus), ("GPU", one.gpus)):
            if each * one.producers > (there := ray.cluster_resources().get(kind, 0)):
                where = f"the cluster at {one.address}" if one.address else "this machine"
                raise ValueError(
                    f"model.features: {how_many(one.producers, 'producer')} of {each:g} {kind}s each, and {where} has "
                    f"{there:g}: ask for fewer, or name a larger cluster by model.features.address"
                )
        if target.origin is None:
            raise ValueError(
                "features Streamed need a target that producers can load: give its directory or Hub id"
            )
        # of the rows alone
        longest = 0
        keys = set()
        for row in itertools.chain(*map(each_row, self.data.splits)):
            longest = max([longest, *map(len, row.pieces())])
            if row.tokens and one.tee is not None:
                keys.add(row.key)
        source = dataclasses.replace(target.origin, parts=False)
        if one.address:  # whose processes stand in other directories
            near = {name: os.path.abspath(path) for name in ("source", "adapter")
                    if (path := getattr(source, name)) and os.path.exists(path)}  # fmt: skip
            source = dataclasses.replace(source, **near)
        python = (
            {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ and not one.address else {}
        )
        threads = {"OMP_NUM_THREADS": str(one.cpus), "MKL_NUM_THREADS": str(one.cpus)}
        place = {
            "num_cpus": one.cpus,
            "num_gpus": one.gpus,
            "runtime_env": {"env_vars": python | threads},
        }

        def hire(kind: type, name: str, *arguments: Any, **options: Any) -> Any:
            options |= {"name": f"{name}-{run}", "namespace": NAMESPACE, "max_restarts": -1}
            return ray.remote(kind).options(**options).remote(*arguments)

        given = one.engine, source, contract, longest, one.rows, one.vllm_args
        # a producer's calls are not tried again: a row that is lost goes to the one that is free first
        producers = [
            hire(Producer, f"producer-{number}", *given, max_concurrency=LEASES + 1, **place)
            for number in range(one.producers)
        ]
        log.info("waiting for %s of %s", how_many(one.producers, "producer"), target.source)
        found = self._answers(producers, "about", "a producer cannot start")
        identity, engine = found[0]
        for theirs, runs in found:
            if not target.is_of(theirs):
                raise ValueError(
                    f"a producer has another target, {theirs['source']}, or other weights of it"
                )
            if runs != engine:
                raise ValueError(
                    f"producers run {engine} and {runs}: install one version on all machines"
                )
        contract = dataclasses.replace(contract, target=identity, engine=engine)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        beside = {"num_cpus": 0, "max_task_retries": -1, "scheduling_strategy": here}
        if one.tee is not None:
            self._tee = hire(Tee, "tee", os.path.abspath(one.tee), contract, **beside)
            self._rows = keys
            log.info("waiting for %s, which no other process may be writing", one.tee)
            self._answers([self._tee], "known", "model.features.tee")
        names = [f"producer-{number}-{run}" for number in range(one.producers)]
        tee = None if one.tee is None else f"tee-{run}"
        ledger = hire(
            Ledger, "ledger", contract, names, one.rows, tee, max_concurrency=CALLS, **beside
        )
        ray.get(ledger.about.remote())
        self._kept = (*producers, ledger)  # they end with their handles
        log.info("%s: %s", how_many(one.producers, "producer"), engine)
        joining = {AUTH: os.environ[AUTH]} if AUTH in os.environ else {}
        return one.address or ray.get_runtime_context().gcs_address, f"ledger-{run}", joining

    @staticmethod
    def _answers(actors: Sequence[Any], method: str, wrong: str) -> list[Any]:
        """Of actors that start; ValueError in their words, behind ``wrong``, if one cannot."""
        import ray

        waiting = [getattr(actor, method).remote() for actor in actors]
        found = []
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=PATIENCE)
            if not ready:
                log.warning("still waiting; the cluster has free: %s", ray.available_resources())
            try:
                found += ray.get(ready)
            except ray.exceptions.RayError as error:
                raise ValueError(f"{wrong}: {last_line(error)}") from error
        return found

    def _check(self) -> None:
        """Compare a row of theirs with the target."""
        row = next(row for row in each_row(self.data.splits.validation) if row.tokens)
        self.copy(row, *(found := self.contract.empty(row.tokens)))
        spot_check(self.contract, self.where, found, self.target, row)

    def announce(self, batch: Batch) -> None:
        """Ask for its rows, and have the thread take them as they come."""
        self._start_again()
        number = next(self._batches)
        for row in packed_rows(batch):
            if row.tokens:
                with self._lock:
                    self._asked[row.key].append((number, self._ask(row, number)))
        super().announce(batch)

    def forget(self, batch: Batch) -> None:
        """Let go of its rows, and make those that are not begun no more."""
        super().forget(batch)
        for row in packed_rows(batch):
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
        errors = self._ray.exceptions
        with self._lock:
            asked = self._asked.get(row.key)
            number, call = asked.popleft() if asked else (next(self._batches), None)
            if not asked:
                self._asked.pop(row.key, None)
        while True:
            call = self._ask(row, number) if call is None else call
            try:
                answer = self._wait(call)
                if isinstance(answer, str):
                    raise ValueError(f"a producer of features failed: {answer}")
                unpack(self.contract, self._wait(answer[0]), row, columns_T)
                return
            except errors.RayTaskError:
                raise
            except errors.RayError as error:  # who made it or kept it has died
                log.warning(
                    "a row's features are lost, and are made again: %s", type(error).__name__
                )
                call = None  # at the place that it had

    def _ask(self, row: PackedRow, batch: int) -> Any:
        return self._ledger.features_of.remote(batch, row)

    def _wait(self, reference: Any) -> Any:
        """What it stands for, unless the source is closed meanwhile."""
        waited = 0.0
        while not self._stop.is_set():
            if self._ray.wait([reference], timeout=POLL)[0]:
                return self._ray.get(reference)
            if (waited := waited + POLL) % PATIENCE == 0:
                log.warning(
                    "waiting for features since %.0f s: the producers are starting, or too slow",
                    waited,
                )
        raise ValueError("the features are closed")

    def close(self, failed: bool = False) -> None:
        """End producers, ledger and what was asked for; a new batch starts them again."""
        if self._ledger is None:
            return
        self._stop.set()
        super().close()
        self._asked.clear()
        if distributed.is_initialized() and not failed:
            distributed.barrier()  # nobody needs them any more
        try:
            if rank() == 0:
                self._tell()
        except self._ray.exceptions.RayError as error:
            log.warning("streamed features: %s", last_line(error))
        finally:
            self._end()

    def _end(self) -> None:
        """Producers and ledger end with their handles, and the cluster if this process started it."""
        self._ledger = None
        self._kept = ()
        if self._ours and "ray" in sys.modules:
            sys.modules["ray"].shutdown()

    def _tell(self) -> None:
        """Log what was done, and complete what the tee has."""
        counts = self._ray.get(self._ledger.counts.remote())
        log.info(
            "streamed %s, %d of them begun again", how_many(counts["done"], "row"), counts["again"]
        )
        if self.features.tee is not None:
            missing = self._ray.get(self._tee.finish.remote(self._rows))
            self._ray.kill(self._tee)  # which lets go of the folder
            said = (
                f"{how_many(missing, 'row')} missing, which specdec cache makes"
                if missing
                else "complete"
            )
            log.info("%s: %s", self.features.tee, said)


def rank() -> int:
    """Of this process among those that train together."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def agreed(make: Callable[[], Made]) -> Made:
    """What the first process makes, on every process; a ValueError on all if it fails there."""
    if not distributed.is_initialized():
        return make()
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [(make(), None)]
        except Exception as error:  # noqa: BLE001  whatever it is, the others wait
            box = [(None, str(error) if isinstance(error, ValueError) else last_line(error))]
    distributed.broadcast_object_list(box)
    made, wrong = box[0]
    if wrong is not None:
        raise ValueError(wrong)
    return made
