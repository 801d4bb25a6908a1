"""A module of multi-token prediction is a drafter: one step, the unroll and decoding are what the module says.

Legend: T tokens, N aux layers, H hidden.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

from specdec.decoding import Chain, DynamicTree, PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Norms, PreNorm, TargetNorm, Wide
from specdec.drafter.entry import Entered
from specdec.drafter.model import ROUTER_BIAS, skeleton_of
from specdec.drafter.target_layer import COMPARED
from specdec.drafting.slots import KeptSlots
from specdec.export import import_drafter
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.building import config_for, new_drafter
from tests.mtp import BASE, CONFIGS, FAMILIES, Module, made, rotary_tables
from tests.parity.unrolled import worst_gap
from tests.tiny import HIDDEN, LAYERS, VOCAB, mtp, tiny_config, tiny_target

DESIGN = mtp()


@pytest.fixture(params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Target, Module, Drafter]:
    target, module = made(request.param, tmp_path)
    return target, module, import_drafter(tmp_path, target)


def read(drafter: Drafter, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens (1, T) and features (1, T, 1, H)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, length), generator=generator)
    return ids, torch.randn(1, length, 1, HIDDEN, dtype=torch.float64, generator=generator)


def test_one_step_is_the_module(subject: tuple[Target, Module, Drafter]) -> None:
    """Of all nodes, and of some; what goes on is what vLLM hands on."""
    target, module, drafter = subject
    ids_1T, aux_1TNH = read(drafter, 11)
    view = View.packed(torch.zeros_like(ids_1T))
    step = drafter.step(ids_1T, drafter.fuse(aux_1TNH), view)
    raw_1TH = module(target.embedding_weight()[ids_1T], aux_1TNH[:, :, 0])
    torch.testing.assert_close(step.normed_BTH, module.norm(raw_1TH), rtol=0, atol=1e-10)
    on_1TH = raw_1TH if isinstance(drafter.config.recurrence, PreNorm) else module.norm(raw_1TH)
    torch.testing.assert_close(step.h_BTH, on_1TH, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        drafter.logits(step.normed_BTH),
        module.norm(raw_1TH) @ target.head_weight().T,
        rtol=0,
        atol=1e-9,
    )
    wanted = torch.tensor([[2, 9, 4]])
    some = drafter.step(ids_1T, drafter.fuse(aux_1TNH), view._replace(wanted_BM=wanted))
    torch.testing.assert_close(some.normed_BTH, step.normed_BTH[:, wanted[0]], rtol=0, atol=1e-10)


def test_unrolled_logits_equal_cached_drafting(subject: tuple[Target, Module, Drafter]) -> None:
    drafter = subject[2]
    # others choose experts in float32
    most = 1e-10 if drafter.config.target["model_type"] == "qwen3_next" else 2e-6
    assert worst_gap(drafter, [0] * 8) < most
    assert worst_gap(drafter, [0, 0, 0, 0, 1, 1, 1, 1]) < most


def test_the_unroll_of_kept_slots_is_that_of_all(subject: tuple[Target, Module, Drafter]) -> None:
    drafter = subject[2]
    ids_1T, aux_1TNH = read(drafter, 40)
    trained_K1T = torch.zeros(3, 1, 40, dtype=torch.bool)
    trained_K1T[:, :, 20:30] = True
    kept = KeptSlots.of(trained_K1T)
    assert kept is not None
    documents = torch.zeros_like(ids_1T)
    whole = drafter.unroll(ids_1T, aux_1TNH, documents, 3)
    part = drafter.unroll(ids_1T, aux_1TNH, documents, 3, kept=[kept] * 3)
    for one, two in zip(whole, part, strict=True):
        torch.testing.assert_close(two.normed_BTH, kept.take(one.normed_BTH), rtol=0, atol=1e-10)


def test_greedy_decoding_is_lossless(subject: tuple[Target, Module, Drafter]) -> None:
    target, _, drafter = subject
    plain = PlainDecoder(target).generate([3, 1, 4], 24).ids
    for shape in (
        Chain(3),
        *(() if target.recurrent else (DynamicTree(depth=3, top_k=3, nodes=8),)),
    ):
        assert SpeculativeDecoder(target, drafter, shape).generate([3, 1, 4], 24).ids == plain


def test_a_new_one_is_drawn_stored_and_on_the_meta_device(
    subject: tuple[Target, Module, Drafter],
) -> None:
    target, _, imported = subject
    drafter = new_drafter(
        target, dataclasses.replace(DESIGN, recurrence=imported.config.recurrence)
    )
    assert drafter.config == imported.config == DrafterConfig.from_json(imported.config.to_json())
    assert all(bool(value.isfinite().all()) for value in drafter.state_dict().values())
    matrices = {name: value for name, value in drafter.state_dict().items() if value.ndim > 1}
    assert len(matrices) > 10 and all(float(value.std()) > 0.01 for value in matrices.values())
    skeleton = skeleton_of(drafter.config).state_dict()
    assert {name for name, value in skeleton.items() if not value.is_meta} == {"vocab.target_ids_D"}
    assert {name: value.shape for name, value in skeleton.items()} == {
        name: value.shape for name, value in drafter.state_dict().items()
    }


@pytest.mark.parametrize("kind", COMPARED)
def test_a_layer_is_transformers_own(kind: str) -> None:
    """With its rope; those without a module in their checkpoints are trained from scratch."""
    sizes = BASE | (
        CONFIGS[kind][1] if kind in CONFIGS else {"num_key_value_heads": 2, "head_dim": 8}
    )
    known = {"vocab_size": VOCAB, "num_target_layers": LAYERS, "identity": {}}
    torch.manual_seed(0)
    config = DrafterConfig.for_target(DESIGN, CONFIG_MAPPING[kind](**sizes), **known)
    drafter = Drafter(config, torch.arange(VOCAB)).double()
    own = AutoModel.from_config(
        config.attention.text_config(), attn_implementation="eager", experts_implementation="eager"
    )
    own = own.double()
    for value in drafter.layers.state_dict().values():
        value.normal_(0, 0.3)
    own.layers[0].load_state_dict(drafter.layers.layers[0].block.state_dict())
    x_BTH, positions_BT = (
        torch.randn(2, 9, HIDDEN, dtype=torch.float64),
        torch.arange(9).expand(2, -1),
    )
    hidden_TT = torch.ones(9, 9, dtype=torch.bool).triu(1)
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(hidden_TT, float("-inf"))[None, None]
    theirs = own.layers[0](
        x_BTH,
        attention_mask=mask,
        position_embeddings=rotary_tables(own.rotary_emb, x_BTH, positions_BT),
    )
    ours = drafter.layers(Entered(x_BTH, None, x_BTH), View.packed(torch.zeros_like(positions_BT)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)  # some routers choose in float32


def test_a_routers_bias_is_not_rounded() -> None:
    """As in transformers, whatever the drafter's dtype; and it is stored and loaded so."""
    config = CONFIG_MAPPING["glm4_moe"](**BASE, **CONFIGS["glm4_moe"][1])
    known = {"vocab_size": VOCAB, "num_target_layers": LAYERS, "identity": {}}
    drafter = Drafter(DrafterConfig.for_target(DESIGN, config, **known), torch.arange(VOCAB))
    (bias,) = (value for name, value in drafter.named_buffers() if name.endswith(ROUTER_BIAS))
    bias.copy_(8 + torch.arange(4) / 1000)
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = Drafter(drafter.config, torch.arange(VOCAB))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for name, x in built.named_buffers() if name.endswith(ROUTER_BIAS)} == {
        torch.float32
    }
    rounded = drafter.to(torch.bfloat16)
    (kept,) = (value for name, value in rounded.named_buffers() if name.endswith(ROUTER_BIAS))
    assert kept.dtype == torch.float32 and torch.equal(kept, 8 + torch.arange(4) / 1000)
    assert {value.dtype for value in rounded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": Wide()}, "use entry Narrow"),
        (
            {"norms": dataclasses.replace(DESIGN.norms, query_key=True)},
            "norms.query_key: with attention TargetLayer",
        ),
        (
            {"norms": dataclasses.replace(DESIGN.norms, input=True)},
            "norms.input: with attention TargetLayer",
        ),
        ({"attention_bias": True}, "attention_bias: with attention TargetLayer"),
        ({"num_layers": 2}, "num_layers is 2"),
        ({"intermediate_size": 40}, "intermediate_size 40: the target's layer has 48"),
    ],
)
def test_what_the_layer_has_itself_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(dataclasses.replace(DESIGN, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such"}, "transformers has no model_type 'no_such'"),
        (
            {"model_type": "gemma2"},
            "a layer of gemma2 may be more than .* for targets of deepseek_v3, glm4_moe",
        ),
        ({"num_hidden_layers": 2}, "must be of one layer"),
        ({"auto_map": {"AutoModel": "evil--code.Model"}}, "say nothing of code"),
        ({"num_attention_heads": 8}, "num_attention_heads 4: the target's layer has 8"),
        ({"rope_parameters": {"rope_type": 7}}, "rope .*: the target's layer has"),
    ],
)
def test_a_config_of_another_layer_is_refused(change: dict[str, object], message: str) -> None:
    stored = tiny_config(DESIGN).to_json()
    stored["attention"]["init_args"]["hf_config"] |= change
    with pytest.raises(ValueError, match=message):
        skeleton_of(DrafterConfig.from_json(stored))


def test_its_norm_needs_its_layer() -> None:
    with pytest.raises(ValueError, match="TargetNorm goes with attention TargetLayer"):
        skeleton_of(config_for(DrafterSpec(norms=Norms(embed=TargetNorm())), tiny_target()))
