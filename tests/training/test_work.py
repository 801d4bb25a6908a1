"""Counted work against torch's own counter, and against masks.

Legend: B rows, T tokens, K unroll steps.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specdec.data import Batch
from specdec.drafter import DrafterSpec, LastLayer, Norms
from specdec.nn.unroll import Blocked, Dense, UnrollKernel
from specdec.nn.view import View
from specdec.training import work
from specdec.training.kept import Kept
from specdec.training.ttt import supervised, ttt_unroll
from specdec.training.work import FrozenModel, Work, pairs, peak, row_counts, step_work
from tests.tiny import HIDDEN, LAYERS, VOCAB, presets, tiny_config, tiny_drafter, tiny_target, variants

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm)  # of linear layers; attention is made of bmm
B, T, K = 2, 9, 3
ROWS = (7, 4, 0)  # rows of the head at each step
NOTHING = FrozenModel(0, 0, 0)
BARE = DrafterSpec(LastLayer(), norms=Norms(embed=False, hidden=False), draft_vocab_size=40)
SPECS = presets() | variants() | {"bare": BARE}  # which asks for no gradient by the first step's states


def counted(counter: FlopCounterMode, *operators: object) -> int:
    return sum(counter.get_flop_counts()["Global"].get(operator, 0) for operator in operators)


def forward(
    spec: DrafterSpec,
    train_embed: bool,
    train_head: bool,
    T: int = T,
    rows: tuple[int, ...] = ROWS,
    kernel: UnrollKernel = Blocked(),  # noqa: B008  keeps nothing of a run
    kept: Kept | None = None,
) -> Tensor:
    """A sum over the logits of some rows of every step."""
    drafter = tiny_drafter(spec).requires_grad_()
    drafter.embed_tokens.requires_grad_(train_embed)
    drafter.lm_head.requires_grad_(train_head)
    aux = torch.randn(B, T, len(drafter.config.aux_layers), HIDDEN, dtype=torch.float64)
    ids, documents = torch.ones(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
    out = torch.zeros((), dtype=torch.float64)
    for step, count in zip(ttt_unroll(drafter, ids, aux, documents, len(rows), kernel, False, kept), rows, strict=True):
        out = out + drafter.logits(step.normed_BTH.flatten(0, 1)[:count]).square().sum()
    return out


def attention(spec: DrafterSpec, T: int = T, K: int = K) -> int:
    """Operations of the attention alone, from the masks of the views."""
    config = tiny_config(spec)
    view = View.packed(torch.zeros(1, T, dtype=torch.int64))
    seen = 0
    for k in range(K):
        late = view._replace(positions_BT=view.positions_BT + k)
        late = late if config.attention_window == "full" else late.within(config.attention_window)
        seen += int(late.mask_B1TS.sum()) + k * T
    return 4 * config.num_attention_heads * config.head_dim * config.num_layers * B * seen


def parts(spec: DrafterSpec, T: int = T, kept: int | None = None, **trained: bool) -> Work:
    kept = B * T if kept is None else kept
    return step_work(tiny_config(spec), NOTHING, B, T, K, kept=kept, rows=sum(ROWS), teacher_rows=0, **trained)


@pytest.mark.parametrize("train_embed", [False, True])
@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_every_product_of_a_linear_layer_is_counted(name: str, train_head: bool, train_embed: bool) -> None:
    spec = SPECS[name]
    got = parts(spec, train_head=train_head, train_embed=train_embed)
    with FlopCounterMode(display=False) as ahead:
        loss = forward(spec, train_embed, train_head)
    with FlopCounterMode(display=False) as back:
        loss.backward()
    assert got.target == got.teacher == 0
    assert got.fuse + got.unroll + got.head - attention(spec) == counted(ahead, *PRODUCTS)
    assert got.backward - 2 * attention(spec) == counted(back, *PRODUCTS)


@pytest.mark.parametrize("name", ["eagle3_1", "two_layer"])
def test_attention_of_single_tokens_is_what_torch_counts(name: str) -> None:
    """With one token a row there is no future to leave out, so that explicit weights cost what is counted."""
    with FlopCounterMode(display=False) as ahead:
        loss = forward(SPECS[name], False, True, 1, (2,), Dense())
    with FlopCounterMode(display=False) as back:
        loss.backward()
    assert attention(SPECS[name], 1, 1) == counted(ahead, aten.bmm)
    assert 2 * attention(SPECS[name], 1, 1) == counted(back, aten.bmm)


def test_windows_that_are_shorter_than_the_text() -> None:
    spec = DrafterSpec(draft_vocab_size=40, attention_window=16)
    wide, narrow = parts(DrafterSpec(draft_vocab_size=40), 40), parts(spec, 40)
    full = attention(DrafterSpec(draft_vocab_size=40), 40)
    assert wide.unroll - narrow.unroll == full - attention(spec, 40) > full // 3
    assert pairs(5) == 15 and pairs(5, 2) == 9 and pairs(5, 9) == 15 and pairs(5, 0) == pairs(5, -1) == 0


def test_the_targets_forward_and_its_logits() -> None:
    target, ids = tiny_target(), torch.ones(B, T, dtype=torch.int64)
    view = View.packed(torch.zeros_like(ids))
    with FlopCounterMode(display=False) as counter:
        final = target.forward(ids, view, [2]).final_BTH
    model = FrozenModel.of(target.model)
    assert model.layers == LAYERS and model.width == 4 * 12
    assert 2 * model.weights * B * T == counted(counter, *PRODUCTS)
    assert model.forward(B, T) == 2 * model.weights * B * T + 4 * 48 * LAYERS * B * T * (T + 1) // 2
    config = tiny_config(DrafterSpec(draft_vocab_size=40))
    for whole, rows_V in ((True, None), (False, torch.arange(40))):
        with FlopCounterMode(display=False) as counter:
            target.logits(final, rows_V)
        got = step_work(config, model, B, T, K, kept=0, rows=0, teacher_rows=B * T, whole_vocabulary=whole)
        assert got.teacher == counted(counter, *PRODUCTS) > 0
        assert got.target == model.forward(B, T) and got.head == 0


@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_slots_that_are_left_out_cost_their_first_keys(name: str) -> None:
    slots_BM = torch.tensor([[1, 4, 6], [0, 3, 7]])
    kept = Kept(slots_BM, torch.zeros(B * T, dtype=torch.int64))
    spec = (presets() | variants())[name]
    got = parts(spec, kept=slots_BM.numel())
    with FlopCounterMode(display=False) as ahead:
        loss = forward(spec, True, True, rows=(6, 4, 1), kept=kept)
    with FlopCounterMode(display=False) as back:
        loss.backward()
    config, seen = tiny_config(spec), [3 * ((T + 1) / 2 + k) for k in range(K)]
    attended = round(4 * config.num_attention_heads * config.head_dim * B * sum(seen))
    assert got.fuse + got.unroll + got.head - attended == counted(ahead, *PRODUCTS)
    assert counted(back, *PRODUCTS) < 2 * counted(ahead, *PRODUCTS)


def test_the_sum_is_linear_in_rows() -> None:
    def total(kept: int, rows: int, teacher_rows: int) -> int:
        config = tiny_config(presets()["eagle3"])
        return step_work(config, NOTHING, B, T, K, kept=kept, rows=rows, teacher_rows=teacher_rows).total

    none = total(0, 0, 0)
    slots, rows, teacher_rows = total(T, 0, 0) - none, total(0, 1, 0) - none, total(0, 0, 1) - none
    assert total(2 * T, 30, 11) == none + 2 * slots + 30 * rows + 11 * teacher_rows
    got = Work(1, 20, 300, 4000, 50000, 600000)
    assert got.total == 654321


def test_rows_are_those_that_training_supervises() -> None:
    generator = torch.Generator().manual_seed(0)
    for K in (1, 4, 20):
        mask = torch.rand(5, 16, generator=generator) < 0.7
        documents = torch.randint(0, 3, (5, 16), generator=generator).sort(dim=1).values
        documents[:2, 13:] = -1
        batch = Batch(torch.zeros_like(documents), mask, documents)
        trained = [supervised(mask, documents, k) for k in range(K)]
        taught = torch.zeros(5, 16, dtype=torch.bool)
        for k, slots in enumerate(trained):
            for b, t in slots.nonzero().tolist():
                taught[b, t + 1 + k] = True
        want = [int(torch.stack(trained).any(0).sum()), int(sum(slots.sum() for slots in trained)), int(taught.sum())]
        assert row_counts(batch, K).tolist() == want and want[2] > 0


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA L40", None),
    ],
)
def test_peaks_of_datasheets(name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak(torch.device("cuda"), torch.bfloat16)
    assert (found and found.flops) == (teraflops and teraflops * 1e12)
    assert found is None or found.source == f"{name} datasheet, dense bfloat16"


def test_float32_on_tensor_cores_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    for precision, teraflops in (("highest", 19.5), ("high", 156.0)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        found = peak(torch.device("cuda"), torch.float32)
        assert found is not None and found.flops == teraflops * 1e12
    assert peak(torch.device("cuda"), torch.float64) is None
    assert peak(torch.device("meta"), torch.float32) is None


def test_a_processors_peak_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "PROBE_SIZE", 128)
    monkeypatch.setattr(work, "PROBE_SECONDS", 0.01)
    work._measured.cache_clear()
    state = torch.get_rng_state()
    found = peak(torch.device("cpu"), torch.float32)
    assert found is not None and found.source == "measured matmul peak, float32"
    assert 1e7 < found.flops < 1e15
    assert peak(torch.device("cpu"), torch.float32) == found
    assert torch.equal(torch.get_rng_state(), state)
    work._measured.cache_clear()  # not measured on small products for anybody else


def test_a_frozen_head_over_the_whole_vocabulary() -> None:
    """A whole draft vocabulary costs what the target's does."""
    config = tiny_config(presets()["eagle1"])
    got = step_work(config, NOTHING, B, T, 1, kept=0, rows=5, teacher_rows=5, train_head=False)
    assert config.draft_vocab_size == VOCAB and got.head == got.teacher == 2 * 5 * HIDDEN * VOCAB
