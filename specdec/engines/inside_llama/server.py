"""llama.cpp's server out of the package xllamacpp, with those options of ``llama-server`` that specdec gives.

A separate script, run as a child process: an assertion of llama.cpp ends the process that it is in.
"""

import argparse
import os
import signal
import sys

import xllamacpp  # type: ignore[import-untyped]


def parse_command_line() -> argparse.Namespace:
    """Parse the command line; options of ``llama-server`` that are not here end it with the remedy."""
    parser = argparse.ArgumentParser(
        prog="llama-server (xllamacpp)", allow_abbrev=False,
        epilog="For other options build llama.cpp and name its llama-server by SPECDEC_LLAMA_SERVER.",
    )  # fmt: skip
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--spec-draft-model")
    kinds = ["draft-eagle3", "draft-dflash", "draft-dspark"]
    parser.add_argument("--spec-type", choices=kinds, default=kinds[0])
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--parallel", "-np", type=int)
    parser.add_argument("--ctx-size", "-c", type=int)
    parser.add_argument("--threads", "-t", type=int)
    parser.add_argument("--verbosity", "-lv", type=int)
    parser.add_argument("--flash-attn", "-fa", choices=["on", "off", "auto"], default="auto")
    parser.add_argument("--metrics", action="store_true")
    for option in (
        "--cache-type-k",
        "--cache-type-v",
        "--spec-draft-type-k",
        "--spec-draft-type-v",
    ):
        parser.add_argument(option, choices=["f32", "f16", "bf16", "q8_0"])
    return parser.parse_args()


def parameters(options: argparse.Namespace) -> "xllamacpp.CommonParams":
    """Return the options as llama.cpp's parameters."""
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.hostnames = [options.host]
    params.port = options.port
    params.endpoint_metrics = options.metrics
    if keys := os.environ.get("LLAMA_API_KEY"):  # which llama-server reads as well
        params.api_keys = keys.split(",")
    flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[options.flash_attn]
    kind = f"LLAMA_FLASH_ATTN_TYPE_{flash}"
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, kind)
    params.n_parallel = options.parallel or 1
    if options.ctx_size:
        params.n_ctx = options.ctx_size
    if options.verbosity is not None:
        params.verbosity = options.verbosity
    draft = params.speculative.draft
    if options.spec_draft_model:
        kind = options.spec_type.upper().replace("-", "_")
        types = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        draft.mparams.path = options.spec_draft_model
        draft.n_max = options.spec_draft_n_max
        draft.p_min = options.spec_draft_p_min
    if options.threads:
        for threads in (
            params.cpuparams,
            params.cpuparams_batch,
            draft.cpuparams,
            draft.cpuparams_batch,
        ):
            threads.n_threads = options.threads
    for owner, kind, value in (
        (params, "cache_type_k", options.cache_type_k),
        (params, "cache_type_v", options.cache_type_v),
        (draft, "cache_type_k", options.spec_draft_type_k),
        (draft, "cache_type_v", options.spec_draft_type_v),
    ):
        if value:
            setattr(owner, kind, getattr(xllamacpp.ggml_type, f"GGML_TYPE_{value.upper()}"))
    return params


def serve_until_signal() -> None:
    """Serve until a signal comes."""
    server = xllamacpp.Server(parameters(parse_command_line()))
    sys.stderr.write(f"listening on {server.listening_address}\n")
    sys.stderr.flush()
    signal.sigwait({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    serve_until_signal()
