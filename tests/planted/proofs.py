"""The proofs that README and documentation name, and the lists of faults that each must find.

Every list is that of a test, which calls the proof itself once for each fault.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specdec.diagnostics import planted as in_engines
from tests.decoding import test_accept_wrong as accept
from tests.diagnostics import test_parity_export_faults as exports
from tests.engines import test_llama
from tests.planted import (
    test_certificate,
    test_checksums,
    test_masks,
    test_resume,
    test_training_is_decoding,
)
from tests.target import test_identity, test_proof


class Proof(NamedTuple):
    """A proof.

    Args:
        name: as the documentation's table has it.
        planted: the faults by name.
        test: where they are planted.
    """

    name: str
    planted: Sequence[str]
    test: str


PROOFS = [
    Proof(
        "the target's own states and logits",
        [*test_proof.FAULTS, "window -1", "window +1"],
        "tests/target/test_proof.py",
    ),
    Proof("one target", list(test_identity.CHANGES), "tests/target/test_identity.py"),
    Proof("attention masks", list(test_masks.FAULTS), "tests/planted/test_masks.py"),
    Proof(
        "training is decoding",
        list(test_training_is_decoding.FAULTS),
        "tests/planted/test_training_is_decoding.py",
    ),
    Proof(
        "an export's files, without an engine",
        [*exports.FAULTS, *exports.TENSORS, *exports.CONFIGS],
        "tests/diagnostics/test_parity_export_faults.py",
    ),
    Proof(
        "proposals of a real vLLM",
        # DSpark's is not among them: vLLM drafts with it on GPUs alone
        [fault for fault in in_engines.FAULTS if "Markov" not in fault],
        "benchmarks/planted_faults.py",
    ),
    Proof(
        "proposals of a real llama.cpp",
        [*test_llama.FAULTS, *(f"DSpark: {fault}" for fault in test_llama.BLOCK_FAULTS)],
        "tests/engines/test_llama.py",
    ),
    Proof(
        "lossless: the exact law",
        [f"{type(rule).__name__} {parents} {drawn}" for rule, parents, drawn in accept.WRONG],
        "tests/decoding/test_accept_wrong.py",
    ),
    Proof(
        "lossless: the certificate",
        [*test_certificate.SAMPLED, *test_certificate.GREEDY],
        "tests/planted/test_certificate.py",
    ),
    Proof("checksums", list(test_checksums.FAULTS), "tests/planted/test_checksums.py"),
    Proof("a resumed run", list(test_resume.FAULTS), "tests/planted/test_resume.py"),
]  # fmt: skip
