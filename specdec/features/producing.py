"""What all features have in common that producers make, in processes of a Ray cluster."""

from dataclasses import dataclass
from typing import Any

from specdec.data import TokenData
from specdec.features.contract import DTYPES
from specdec.features.runners import EngineSetup
from specdec.features.source import Features
from specdec.target import TargetSource
from specdec.utils.numbers import Count, NonNegative, Side, check_numbers
from specdec.utils.text import how_many


@dataclass(frozen=True, kw_only=True)
class ProducedFeatures(Features):
    """The target runs in separate processes, on this machine or on others of a Ray cluster, a few batches ahead.

    Args:
        producers: copies of the target.
        ahead: batches that a process of training has asked for beyond the one it trains on. They bound the memory of
            its machine: ``ahead + 1`` batches' states at a time.
        dtype: of the states on their way: ``target``, float32, bfloat16, float16, or float8_e4m3fn, which has a scale
            for every token's state and takes half of bfloat16's bytes.
        cpus: of each producer, which are its threads too.
        gpus: of each producer.
        address: of a Ray cluster that runs (``auto``, ``HOST:6379``); None starts one on this machine.
    """

    made_ahead = True
    producers: Side = 1
    ahead: Side = 4
    dtype: str = "target"
    cpus: Count = 1
    gpus: NonNegative = 0.0
    address: str | None = None

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self), "model.features.")
        if self.dtype != "target" and self.dtype not in DTYPES:
            raise ValueError(
                f"model.features.dtype={self.dtype}: choose target or one of {', '.join(DTYPES)}"
            )
        if self.gpus and not self.address:
            raise ValueError(
                "model.features.gpus needs model.features.address: of the GPUs that training leaves free make a "
                "cluster, CUDA_VISIBLE_DEVICES=4,5,6,7 ray start --head, and name it: auto"
            )

    @property
    def stored_in(self) -> str | None:
        """The directory where the rows are stored, too; None for none."""
        return None

    @property
    def rows_at_once(self) -> int:
        """How many rows a producer takes at once."""
        return 1

    def setup_of(self, source: TargetSource, data: TokenData) -> EngineSetup:
        """What a producer runs the target with, for this data."""
        raise NotImplementedError

    def check_room(self, ray: Any) -> None:
        """Raise ValueError if the cluster is too small for the producers."""
        for kind, amount in (("CPU", self.cpus), ("GPU", self.gpus)):
            available = ray.cluster_resources().get(kind, 0)
            if amount * self.producers > available:
                where = f"the cluster at {self.address}" if self.address else "this machine"
                raise ValueError(
                    f"model.features: {how_many(self.producers, 'producer')} of {amount:g} {kind}s each, and "
                    f"{where} has {available:g}: ask for fewer, or name a larger cluster by model.features.address"
                )
