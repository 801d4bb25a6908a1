"""The estimate against what autograd keeps and what the allocator gave.

Legend: B rows, T tokens, K unroll steps.
"""

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specdec import host
from specdec.data import Batch
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Norms, PreNorm
from specdec.nn.tiles import kept_bytes
from specdec.nn.unroll import Blocked
from specdec.target import Target
from specdec.training import estimate as module
from specdec.training.estimate import MB, Estimate, activations, estimate, free_memory, module_bytes, report
from specdec.training.objective import Recipe, objective, teach
from specdec.training.ttt import ttt_unroll
from specdec.training.work import linear_weights
from tests.tiny import LAYERS, llama_config, presets, variants

SPECS = presets() | variants()
VOCAB = 400
CPU = torch.device("cpu")
SIZES = {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}


def config_of(spec: DrafterSpec) -> DrafterConfig:
    return DrafterConfig.for_target(
        spec, llama_config(**SIZES), vocab_size=VOCAB, num_target_layers=LAYERS, identity={"source": "tiny"}
    )


def drafter_of(spec: DrafterSpec) -> Drafter:
    config = config_of(spec)
    drafter = Drafter(config, torch.arange(config.draft_vocab_size))
    drafter.embed_tokens.requires_grad_(False)
    return drafter


def kept(drafter: Drafter, B: int, T: int, K: int, autocast: bool) -> int:
    """Bytes of all that fusion and unroll save, weights, their copies, the target's states and biases left out."""
    aux = torch.randn(B, T, len(drafter.config.aux_layers), drafter.config.target_hidden_size)
    ids, documents = torch.ones(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
    shapes = {shape for p in drafter.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
    others = {x.untyped_storage().data_ptr() for x in (aux, *drafter.parameters())}
    alive: list[Any] = []  # else an address is given twice
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        alive.append(x)
        if storage.data_ptr() not in others and tuple(x.shape) not in shapes:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        alive += ttt_unroll(drafter, ids, aux, documents, K, Blocked())
    return sum(found.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_activations_are_what_autograd_keeps(name: str, autocast: bool) -> None:
    drafter, B, T = drafter_of(SPECS[name]), 2, 40
    for K in (1, 4, 5):
        real = kept(drafter, B, T, K, autocast)
        got = activations(drafter.config, B, T, K, torch.float32, torch.bfloat16 if autocast else None)
        whole = drafter.config.attention_window == "full"
        biases = kept_bytes(B, T) * (1 if whole else K)  # the kernel holds these itself
        assert got - biases == pytest.approx(real, rel=0.02), K


def in_memory(drafter: Drafter, B: int, T: int, K: int, autocast: bool, checkpointing: bool) -> int:
    """Bytes that stand between forward and backward, by the allocator; weights and the target's states left out."""
    config = drafter.config
    aux = torch.randn(B, T, len(config.aux_layers), config.target_hidden_size)
    ids, documents = torch.ones(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
    kernel = Blocked()  # knows the biases, which the backward pass needs too
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        for step in ttt_unroll(drafter, ids, aux, documents, K, kernel, checkpointing):
            loss = step.normed_BTH.sum()  # the last one's holds the graph
        del step
    assert profile.profiler is not None and profile.profiler.kineto_results is not None and loss.requires_grad
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    cast = linear_weights(drafter.entry) + linear_weights(drafter.layers)
    if config.norms.aux != "none":  # else fusion's gradient is taken without its weight
        cast += linear_weights(drafter.fusion)
    return sum(event.nbytes() for event in events) - 2 * cast * autocast


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What earlier tests left is not freed meanwhile."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_so_much_stands_in_memory(name: str, autocast: bool) -> None:
    """What the graph holds in other ways than by saving it, in closures and hooks, would show here."""
    drafter, B, T, K = drafter_of(SPECS[name]), 2, 128, 4
    got = activations(drafter.config, B, T, K, torch.float32, torch.bfloat16 if autocast else None)
    assert got == pytest.approx(in_memory(drafter, B, T, K, autocast, False), rel=0.01)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", SPECS)
def test_so_much_stands_in_memory_with_checkpointing(name: str) -> None:
    """Before the backward pass: the step that is whole again comes on top of it."""
    drafter, B, T, K = drafter_of(SPECS[name]), 2, 128, 6
    config = drafter.config
    biases = kept_bytes(B, T) * (config.attention_window != "full")
    whole_again = activations(config, B, T, K) - activations(config, B, T, K - 1) - biases
    before = activations(config, B, T, K, checkpointing=True) - whole_again
    assert before == pytest.approx(in_memory(drafter, B, T, K, False, True), rel=0.04)


def test_long_rows_need_memory_in_proportion() -> None:
    config = config_of(SPECS["eagle3_1"])
    short, long = (activations(config, 1, T, 3, checkpointing=True) for T in (2**15, 2**17))
    assert long == pytest.approx(4 * short, rel=1e-3)


def test_checkpointing_keeps_less() -> None:
    config = config_of(SPECS["two_layer"])
    plain, thrifty = (activations(config, 2, 64, 7, checkpointing=on) for on in (False, True))
    assert thrifty < 0.4 * plain
    more = activations(config, 2, 64, 8, checkpointing=True) - thrifty
    once = 2 * 4 * (2 * 96 + (4 + 2 * 2) * 24)  # one token more is read: embedding, its normed self, what comes of it
    assert more == once + 2 * 64 * 4 * (96 + 2 * 2 * 2 * 24)  # the feature, and keys and values of two layers


def peak_bytes(drafter: Drafter, target: Target, B: int, T: int, recipe: Recipe, autocast: bool) -> int:
    """The most that a step's forward and backward had allocated at once, over what stood before."""
    shape = (B, T)
    batch = Batch(torch.ones(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool), torch.zeros(shape).long())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = objective(drafter, batch, teach(target, drafter, batch, recipe, False), recipe, False).loss
        loss.backward()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("spec", [DrafterSpec(norms=Norms(), recurrence=PreNorm()), DrafterSpec()], ids=["3", "3.1"])
def test_a_whole_step_takes_what_was_estimated(spec: DrafterSpec, autocast: bool) -> None:
    drafter, B, T = drafter_of(spec), 6, 128
    target = Target(LlamaForCausalLM(llama_config(**SIZES)))
    recipe = Recipe(steps=5, kernel=Blocked(64), piece_bytes=2**18)
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    got = estimate(
        drafter.config,
        sum(p.numel() for p in drafter.parameters()),
        trainable,
        B,
        T,
        5,
        autocast=torch.bfloat16 if autocast else None,
        piece_bytes=recipe.piece_bytes,
    )
    during = got.ahead - got.gradients - got.optimizer  # gradients come when activations go
    real = peak_bytes(drafter, target, B, T, recipe, autocast) - (2 * trainable if autocast else 0)
    assert during == pytest.approx(real, rel=0.25)


def test_parts_and_their_sum() -> None:
    drafter = drafter_of(SPECS["eagle3_1"])
    every, trained = module_bytes(drafter) // 4, 1000
    config, target = drafter.config, nn.Linear(8, 4, dtype=torch.bfloat16)
    got = estimate(
        config, every, trained, 2, 40, 3,
        target_bytes=module_bytes(target), target_dtype=torch.bfloat16,
        optimizer_state_bytes_per_parameter=4, piece_bytes=2**20,
    )  # fmt: skip
    assert got.weights == 4 * every and got.gradients == 4000 and got.optimizer == 4000
    assert got.target == 2 * (8 * 4 + 4)
    assert got.teacher == 2 * 40 * 96 * (3 * 4 + 2)  # three states for the drafter, the last in the target's dtype
    assert got.activations == activations(config, 2, 40, 3)
    frozen = estimate(config, every, trained, 2, 40, 3, piece_bytes=2**20, train_head=False)
    assert got.loss - frozen.loss == 4 * 96 * config.draft_vocab_size
    raw = estimate(config_of(SPECS["eagle3"]), every, trained, 2, 40, 3, piece_bytes=2**20)  # the head's own input
    assert raw.loss - got.loss == 2 * 40 * (3 - 1) * 96 * 4  # but the last step's, which has no next one
    cast = estimate(config, every, trained, 2, 40, 3, piece_bytes=2**20, autocast=torch.bfloat16)
    assert cast.weights == got.weights + 2000 and cast.activations < got.activations and cast.loss < got.loss
    assert got.total == sum(vars(got).values()) and got.ahead == got.total - got.weights - got.target


EXPECTED = Estimate(*(part * 10**6 for part in (20, 3000, 10, 4, 5, 6, 7)))


def test_one_line() -> None:
    assert EXPECTED.describe() == (
        "3,052 MB: weights 20, gradients 3,000, optimizer 10, target 4, teacher 5, activations 6, loss 7"
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    box: list[int | None] = [None]
    monkeypatch.setattr(module, "free_memory", lambda device: box[0])
    return box


@pytest.mark.parametrize(("left", "warned"), [(3028 * MB, False), (3028 * MB - 1, True), (None, False)])
def test_a_warning_where_memory_is_short(
    left: int | None, warned: bool, free: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    free[0] = left
    with caplog.at_level(logging.INFO, logger=module.__name__):
        report(EXPECTED, CPU)
    assert caplog.messages[0] == f"estimated memory: {EXPECTED.describe()}"
    assert [record.levelname for record in caplog.records[1:]] == ["WARNING"] * warned
    if warned:
        assert "about 3,028 MB more on cpu, which has 3,028 MB free" in caplog.messages[1]


def test_free_memory_is_unknown_of_what_is_no_host() -> None:
    assert free_memory(torch.device("cpu")) == pytest.approx(host.free_memory(), rel=0.5)
    assert free_memory(torch.device("meta")) is None


def test_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_memory(torch.device("cuda")) == 1300
