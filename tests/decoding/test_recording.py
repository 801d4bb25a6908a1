"""The states that decoding records are those of one forward over the whole text."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.decoding import PlainDecoder, RecordedText, RecordingDecoder, Request, Sampling
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.rounding import compare_boundary, median_error, own_states
from tests.tiny import VOCAB, tiny_target

LAYERS = (0, 3, 7)
MOST = 12
SAMPLINGS = [Sampling(), Sampling(temperature=1.0)]


def requests_of(lengths: Sequence[int], seed: int = 0) -> list[Request]:
    draw = torch.Generator().manual_seed(seed)
    return [
        Request(torch.randint(VOCAB, (length,), generator=draw).tolist(), MOST, number)
        for number, length in enumerate(lengths)
    ]


def forward(target: Target, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The states of all boundaries, (R, L + 1, H), and the final ones, by one pass."""
    ids_1R = torch.tensor([ids])
    layers = range(target.num_layers + 1)
    out = target.forward(ids_1R, View.packed(torch.zeros_like(ids_1R)), layers)
    return out.aux_BTNH[0], out.final_BTH[0]


def check_states(target: Target, text: RecordedText, layers: Sequence[int] = LAYERS) -> None:
    """Every boundary is nearest to itself, within what the model differs from itself by."""
    ids = [*text.generation.prompt, *text.generation.ids]
    aux_RNH, final_RH = forward(target, ids[:-1])
    *allowed, allowed_final, _ = own_states(target).allowed
    by_boundary = {b: [aux_RNH[:, b]] for b in range(target.num_layers + 1)}
    assert len(text.final_RH) == len(ids) - 1
    for n, boundary in enumerate(layers):
        difference = compare_boundary(boundary, [text.aux_RNH[:, n]], by_boundary)
        assert difference.fits(allowed[boundary]), (boundary, difference)
    assert median_error(text.final_RH, final_RH) <= allowed_final


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_texts_are_plain_decodings_and_states_those_of_a_pass(
    sampling: Sampling, dtype: torch.dtype
) -> None:
    """More requests than sequences, of several lengths, some of which end early."""
    target = tiny_target(dtype=dtype)
    requests = requests_of([3, 17, 1, 9, 30])
    ends = set(range(0, VOCAB, 6))
    plain = dict(PlainDecoder(target, sampling, batch=2).generate_all(requests, ends))
    decoder = RecordingDecoder(target, sampling, 2, LAYERS)
    texts = dict(decoder.record(requests, ends))
    assert {number: text.generation.ids for number, text in texts.items()} == {
        number: generation.ids for number, generation in plain.items()
    }
    assert len({len(generation.ids) for generation in plain.values()}) > 1
    for text in texts.values():
        check_states(target, text)


def shifted(text: RecordedText) -> RecordedText:
    return text._replace(aux_RNH=text.aux_RNH.roll(1, 0), final_RH=text.final_RH.roll(1, 0))


def moved(text: RecordedText) -> RecordedText:
    return text._replace(aux_RNH=text.aux_RNH.roll(1, 1))


def unnormed(text: RecordedText) -> RecordedText:
    return text._replace(final_RH=text.aux_RNH[:, -1])


@pytest.mark.parametrize("fault", [shifted, moved, unnormed])
def test_planted_faults_are_seen(fault: object) -> None:
    """States one token late, boundaries that changed places, a final state before its norm."""
    target = tiny_target(dtype=torch.float32)
    decoder = RecordingDecoder(target, Sampling(), 1, LAYERS)
    ((_, text),) = decoder.record(requests_of([9]), ())
    check_states(target, text)
    with pytest.raises(AssertionError):
        check_states(target, fault(text))  # type: ignore[operator]


def test_another_texts_states_are_seen() -> None:
    target = tiny_target(dtype=torch.float32)
    decoder = RecordingDecoder(target, Sampling(), 2, LAYERS)
    texts = dict(decoder.record(requests_of([9, 9]), ()))
    with pytest.raises(AssertionError):
        check_states(target, texts[0]._replace(generation=texts[1].generation))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_text_that_continues_is_read_from_where_it_ended(sampling: Sampling) -> None:
    """Its first part is not read again, whichever sequence it stands in, and longer texts need more slots."""
    target = tiny_target()
    decoder = RecordingDecoder(target, sampling, 3, LAYERS)
    first = dict(decoder.record(requests_of([4, 20, 11]), ()))
    requests = []
    for number, text in reversed(first.items()):
        before = [*text.generation.prompt, *text.generation.ids]
        more = requests_of([5], seed=7 + number)[0].prompt
        requests.append(Request([*before, *more], 40, 10 + number))
    # one that differs in the middle is read from there
    requests[0].prompt[8] = (requests[0].prompt[8] + 1) % VOCAB
    marked = []
    round_ = decoder._round
    assert round_ is not None
    for text, states_SNH in zip(round_.texts, round_.states_BSNH, strict=True):
        with torch.inference_mode():
            states_SNH[3] += 100.0  # what is not computed again keeps the mark
        marked.append(text.tolist())
    assert sorted(marked) == sorted(
        [*text.generation.prompt, *text.generation.ids[:-1]] for text in first.values()
    )
    second = dict(decoder.record(requests, ()))
    plain = dict(PlainDecoder(target, sampling, batch=2).generate_all(requests, ()))
    for number, text in second.items():
        assert text.generation.ids == plain[number].ids
        text.aux_RNH[3] -= 100.0
        text.final_RH[3] -= 100.0
        check_states(target, text)
    decoder.forget()
    ((_, fresh),) = decoder.record(requests[:1], ())
    check_states(target, fresh)


def test_a_call_that_is_given_up_leaves_no_false_text() -> None:
    target = tiny_target()
    decoder = RecordingDecoder(target, Sampling(), 2, LAYERS)
    requests = requests_of([9, 5])
    passes = decoder._passes(requests, ())
    for _ in range(7):
        next(passes)
    passes.close()
    for text in dict(decoder.record(requests, ())).values():
        check_states(target, text)
