"""What ``specdec plan`` prints: sections of figures, then a verdict in sentences."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.commands.plan_costs import BACKWARD, DEVICES
from specdec.utils.text import byte_text, how_many, seconds_text, three_digits

Figures = Mapping[str, Any]
Rows = list[tuple[str, str]]
WRAPPER = textwrap.TextWrapper(
    100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
)
SOURCES = {
    "on_the_fly": "computed in the step by the target",
    "cached": "read from a cache",
    "streamed": "streamed from producers",
}
# parts of the memory that grow with the rows of a batch
BY_ROW = ("target_states", "activations", "loss")
FEWER_TOKENS = "set --model.recompute true, a smaller --data.seq_len or --model.step_keep below 1"
SIXTEEN_BITS = {
    "drafter": "--trainer.precision bf16-mixed",
    "target": "--model.target.dtype bfloat16",
}
SMALLER_TARGET = (
    "keep the target's layers off the trainer: "
    "--model.features Cached (or Streamed) with --model.target.parts true"
)
SMALLER_DRAFTER = (
    "use --trainer.strategy fsdp2 on more devices, "
    "a smaller --model.drafter.draft_vocab_size or another --device"
)


def plan_report(figures: Figures) -> str:
    """Return the figures of a plan as text."""
    sections = {
        "Model": _model(figures),
        "Run": _run(figures),
        "Memory per device": _memory(figures),
        "Time": _time(figures),
        "Network": _network(figures),
        "Disk": _disk(figures),
    }
    lines = []
    for title, rows in sections.items():
        if rows:
            lines += [title, *(f"  {name:<44}{value}" for name, value in rows), ""]
    lines.append("Verdict")
    for sentence in _verdict(figures):
        lines += WRAPPER.wrap(sentence)
    return "\n".join(lines) + "\n"


def _model(figures: Figures) -> Rows:
    return [
        ("target", f"{three_digits(figures['target_parameters'])} parameters"),
        ("drafter, trained", f"{three_digits(figures['drafter_trainable_parameters'])} parameters"),
        ("drafter, frozen", f"{three_digits(figures['drafter_frozen_parameters'])} parameters"),
        ("features", SOURCES[figures["feature_source"]]),
    ]


def _run(figures: Figures) -> Rows:
    rows = figures["train_rows"]
    strategy = figures["strategy"]
    processes = strategy if strategy == "one" else f"{figures['processes']:,} under {strategy}"
    return [
        ("processes", processes),
        ("training data", "unknown" if isinstance(rows, str) else _data(rows, figures["seq_len"])),
        ("a step", _data(figures["rows_per_step"], figures["seq_len"])),
        ("an epoch", _steps(figures["steps_per_epoch"])),
        ("the run", _steps(figures["steps"])),
        ("tokens of the run", _known(figures["tokens"], three_digits)),
    ]


def _data(rows: int, seq_len: int) -> str:
    return f"{how_many(rows, 'row')} of {seq_len:,} tokens: {three_digits(rows * seq_len)} tokens"


def _steps(steps: int | None) -> str:
    return "unknown" if steps is None else how_many(steps, "step")


def _known(value: float | None, text: Any) -> str:
    return "unknown" if value is None else text(value)


def _memory(figures: Figures) -> Rows:
    parts = figures["memory_bytes_per_process"]
    rows = [(name.replace("_", " "), byte_text(size)) for name, size in parts.items() if size]
    rows[-1] = ("total, at the end of a forward pass", rows[-1][1])
    return [
        *rows,
        ("total, in a backward pass, at most", byte_text(BACKWARD * parts["total"])),
        ("with the whole target, forward pass", byte_text(figures["memory_bytes_with_target"])),
        ("with parts of the target, forward pass", byte_text(figures["memory_bytes_with_parts"])),
    ]


def _time(figures: Figures) -> Rows:
    if "on_devices" not in figures:
        return []
    sources = figures["on_devices"]
    flops = figures["flops_per_token"]
    total = sum(flops.values())
    share = "; ".join(
        f"{name.replace('_', ' ')} {100 * part / total:.0f}%" for name, part in flops.items()
    )
    rows = [
        (f"a step, features {SOURCES[name].split()[0]}", _speed(source))
        for name, source in sources.items()
    ]
    return [*rows, ("operations, features computed in the step", share)]


def _speed(source: Figures) -> str:
    speed = three_digits(source["tokens_per_second"])
    return f"{seconds_text(source['step_seconds'])}, {speed} tokens a second"


def _network(figures: Figures) -> Rows:
    rows = []
    if exchanged := figures["exchanged_bytes_per_step"]:
        rows.append(("a process sends in a step", byte_text(exchanged)))
    if "on_devices" in figures:
        streamed = figures["on_devices"]["streamed"]
        rate = byte_text(streamed["feature_bytes_per_second_and_process"])
        producers = how_many(streamed["producers"], "producer")
        devices = how_many(streamed["devices_of_a_producer"], "device")
        rows += [
            ("features to a process, cached or streamed", f"{rate} a second"),
            ("of the network, if streamed", f"{100 * streamed['network_share']:.3g}%"),
            ("producers that keep up, if streamed", f"{producers} on {devices} each"),
        ]
    return rows


def _disk(figures: Figures) -> Rows:
    disk = figures["disk_bytes"]
    token = figures["feature_bytes_per_token"]
    rows = [
        ("a checkpoint", byte_text(disk["checkpoint"])),
        ("checkpoints that the run keeps", _known(disk["checkpoints"], byte_text)),
        ("drafters", byte_text(disk["drafters"])),
    ]
    if figures["feature_source"] == "cached":
        rows.append(("feature cache", _known(disk["feature_cache"], byte_text)))
    else:
        rows.append(("a cache of a million tokens would take", byte_text(1e6 * token)))
    return rows


def _verdict(figures: Figures) -> Iterator[str]:
    """Yield sentences: time, memory, disk, what limits the run, and what a budget buys."""
    if isinstance(figures["train_rows"], str):
        yield f"Data: its length is unknown ({figures['train_rows'].rstrip('.')})."
    yield _time_sentence(figures)
    if "on_device" in figures and "float32" in figures["products"].values():
        yield f"A GPU computes faster in 16 bits: {_sixteen_bits(figures)}."
    yield from _memory_sentences(figures)
    yield _disk_sentence(figures)
    yield _limit(figures)
    if "budget" in figures:
        yield _budget_sentence(figures)


def _time_sentence(figures: Figures) -> str:
    steps = figures["steps"]
    if "on_device" not in figures:
        return (
            f"Time: unknown. Pass --device, one of {', '.join(DEVICES)}, to get hours and GPU-hours; "
            "or train 20 steps on your machine and read its tokens per second."
        )
    run = figures["on_device"]
    share = f"{100 * figures['efficiency']:.3g}%"
    dtypes = " and ".join(dict.fromkeys(figures["products"].values()))
    speed = f"at {share} of the {figures['device']}'s peak in {dtypes}, which --efficiency sets"
    if steps is None:
        step = seconds_text(run["step_seconds"])
        return f"Time: {step} a step, {speed}. Set trainer.max_steps to get the hours of the run."
    devices = how_many(run["devices"], f"{figures['device']} device")
    return (
        f"Time: {how_many(steps, 'step')} take {seconds_text(run['seconds'])} on {devices}, "
        f"{three_digits(run['device_hours'])} GPU-hours, {speed}. Validation comes on top."
    )


def _memory_sentences(figures: Figures) -> Iterator[str]:
    memory = figures["memory_bytes_per_process"]
    peak = byte_text(BACKWARD * memory["total"])
    if "on_device" not in figures:
        yield (
            f"Memory: a device needs up to {peak}, and room for Python and libraries. "
            "Pass --device to learn whether that fits."
        )
        return
    run = figures["on_device"]
    size = f"{byte_text(run['memory_bytes_of_device'])} of the {figures['device']}"
    if run["fits"]:
        yield f"Memory: a device needs up to {peak} of the {size}: it FITS."
        return
    yield f"Memory: a device needs up to {peak}, more than the {size}: it DOES NOT FIT."
    remedy = _remedy(memory, figures["batch_size"], run["memory_bytes_of_device"])
    if "float32" in figures["products"].values():
        remedy = f"{_sixteen_bits(figures)}; in float32, {remedy}"
    yield f"To make it fit, {remedy}."


def _sixteen_bits(figures: Figures) -> str:
    """Return the options that a run which computes in float32 lacks."""
    products = figures["products"]
    missing = [option for part, option in SIXTEEN_BITS.items() if products[part] == "float32"]
    return f"set {' and '.join(missing)}"


def _remedy(memory: Mapping[str, int], batch_size: int, room: float) -> str:
    """Return what to change so that the memory fits into ``room`` bytes."""
    by_row = sum(memory[name] for name in BY_ROW)
    fixed = memory["total"] - by_row
    left = room / BACKWARD - fixed
    rows = int(left / (by_row / batch_size))
    if rows >= 1:
        return (
            f"set --data.batch_size {rows} (now {batch_size}) and raise --trainer.accumulate_grad_batches: "
            "the gradient of a step stays the same"
        )
    if left > 0:
        return FEWER_TOKENS
    return SMALLER_TARGET if memory["target"] > fixed / 2 else SMALLER_DRAFTER


def _disk_sentence(figures: Figures) -> str:
    disk = figures["disk_bytes"]
    cached = figures["feature_source"] == "cached"
    parts = "checkpoints, drafters and the feature cache" if cached else "checkpoints and drafters"
    spare = f"and {byte_text(disk['checkpoint'])} more while a checkpoint is written"
    if disk["total"] is not None:
        return f"Disk: the run takes {byte_text(disk['total'])} for {parts}, {spare}."
    missing = "the length of the data" if disk["feature_cache"] is None else "trainer.max_steps"
    return f"Disk: the total for {parts} is unknown without {missing}."


def _limit(figures: Figures) -> str:
    """Return what takes most of the time, or the memory if no device is known."""
    parts = dict(figures["memory_bytes_per_process"])
    total = parts.pop("total")
    largest = max(parts, key=lambda name: parts[name])
    share = f"{100 * parts[largest] / total:.0f}%"
    sentence = f"Limits: {share} of the memory is for the {largest.replace('_', ' ')}"
    if "on_device" not in figures:
        return f"{sentence}."
    source = figures["feature_source"]
    times = figures["on_devices"]
    if source == "on_the_fly":
        step = times["on_the_fly"]["step_seconds"]
        target = 100 * (1 - times["cached"]["step_seconds"] / step)
        return f"{sentence}; the target's forward pass takes {target:.0f}% of the time, which a cache saves."
    if source == "streamed" and times["streamed"]["network_share"] > 1:
        return (
            f"{sentence}; the features need more than the network carries: the hours are too few."
        )
    return f"{sentence}; the drafter's own step takes the time."


def _budget_sentence(figures: Figures) -> str:
    budget = figures["budget"]
    tokens = three_digits(budget["tokens"])
    epochs = budget["epochs"]
    of_data = "" if epochs is None else f", {three_digits(epochs)} epochs"
    return (
        f"Budget: {three_digits(budget['device_hours'])} GPU-hours buy {how_many(budget['steps'], 'step')}, "
        f"{tokens} tokens{of_data}: --trainer.max_steps {budget['steps']}."
    )
