"""Attention of few queries in compiled code on a CPU, as one kernel.

Scores, their softmax and the sums of values stay in a core's cache, and are float32's, of exact products; a library
would be called twice for every layer. The vectors are torch's own, of any width. Where :mod:`specdec.decoding.pairs` is
offered, queries meet keys in pairs of bfloat16.

Legend: B batch, h query heads, g key heads, r = h / g, T queries, S keys, d width of a key, e of a value.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.lowering  # before what follows, which imports it in a circle
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.cpu_vec_isa import VecAVX512, pick_vec_isa
from torch._inductor.ir import CppTemplateBuffer, ExternKernel, FixedLayout, TensorBox, as_storage_and_layout
from torch._inductor.utils import parallel_num_threads

import specdec.nn.few_queries  # noqa: F401 (brings the operation)
from specdec.decoding import pairs

ROWS = 16  # queries of a group that share a pass over its keys: sums of so many stay in registers

SOURCE = r"""
{{template.header().getvalue()}}
#include <memory>

using {{name}}_vec = at::vec::Vectorized<float>;

template <typename T>
inline {{name}}_vec {{name}}_load(const T* from, int64_t count = {{name}}_vec::size()) {
    if constexpr (std::is_same_v<T, float>) return {{name}}_vec::loadu(from, count);
    else return at::vec::convert<float>(at::vec::Vectorized<T>::loadu(from, count));
}

inline {{name}}_vec {{name}}_add(float a, {{name}}_vec b, {{name}}_vec sum) {
    return at::vec::fmadd({{name}}_vec(a), b, sum);
}
{%- if pairs %}

// pairs of numbers
inline __m512i {{name}}_load(const int32_t* from) { return _mm512_loadu_si512(from); }

inline {{name}}_vec {{name}}_add(int32_t a, __m512i b, {{name}}_vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
{%- endif %}

// W columns of a (rows, inputs) times b
template <int64_t rows, typename A, typename T>
inline void {{name}}_rows(
    const A* a, int64_t lda, const T* b, int64_t ldb, int64_t inputs, float* c, int64_t ldc
) {
    using Vec = {{name}}_vec;
    Vec sums[rows];
    #pragma GCC unroll 16
    for (int64_t row = 0; row < rows; ++row) sums[row] = Vec(0.0f);
    for (int64_t k = 0; k < inputs; ++k) {
        const auto other = {{name}}_load(b + k * ldb);
        #pragma GCC unroll 16
        for (int64_t row = 0; row < rows; ++row) sums[row] = {{name}}_add(a[row * lda + k], other, sums[row]);
    }
    #pragma GCC unroll 16
    for (int64_t row = 0; row < rows; ++row) sums[row].store(c + row * ldc);
}

template <typename A, typename T>
inline void {{name}}_product(
    int64_t rows, const A* a, int64_t lda, const T* b, int64_t ldb, int64_t inputs, float* c, int64_t ldc
) {
    switch (rows) {
{%- for row in range(1, rows + 1) %}
        case {{row}}: {{name}}_rows<{{row}}>(a, lda, b, ldb, inputs, c, ldc); break;
{%- endfor %}
    }
}

extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"out": out})}} {
    {{kernel.maybe_codegen_profile()}}
    using Vec = {{name}}_vec;
    constexpr int64_t W = Vec::size(), T = {{T}}, R = {{r}}, D = {{d}}, E = {{e}};
    const int64_t S = {{kernel.size(k, 2)}}, padded = (S + W - 1) / W * W;
    constexpr int64_t blocks = (R * T + {{rows}} - 1) / {{rows}}, block = (R * T + blocks - 1) / blocks;
    #pragma omp parallel for num_threads({{threads}})
    for (int64_t task = 0; task < {{B}} * {{g}} * blocks; ++task) {
        const int64_t batch = task / blocks / {{g}}, group = task / blocks % {{g}}, first = task % blocks * block;
        const int64_t rows = std::min(block, R * T - first);
        const auto key = {{at(k, "batch", "group")}};
        const auto value = {{at(v, "batch", "group")}};
        alignas(64) float sums[block * W], shares[block];
        const std::unique_ptr<float[]> scores(new float[block * padded]);
{%- if pairs %}
        constexpr int64_t inputs = D / 2;
        alignas(64) int32_t turned[inputs * W], queries[block * inputs];
{%- else %}
        constexpr int64_t inputs = D;
        alignas(64) float wide[W * D], turned[D * W], queries[block * D];
{%- endif %}
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t head = group * R + (first + row) / T, query = (first + row) % T;
            const auto from = {{at(q, "batch", "head", "query")}};
{%- if pairs %}
            std::memcpy(queries + row * inputs, from, D * sizeof *from);
{%- else %}
            for (int64_t i = 0; i < D; i += W) {{name}}_load(from + i).store(queries + row * D + i);
{%- endif %}
        }
        for (int64_t s = 0; s < S; s += W) {
            const int64_t count = std::min(W, S - s);
            const auto from = key + s * {{kernel.stride(k, 2)}};
{%- if pairs %}
            at::vec::transpose_mxn<float>(
                (const float*)from, {{kernel.stride(k, 2)}} / 2, (float*)turned, W, count, inputs);
{%- elif kernel.dtype(k) == "float" %}
            at::vec::transpose_mxn<float>(from, {{kernel.stride(k, 2)}}, turned, W, count, D);
{%- else %}
            for (int64_t j = 0; j < count; ++j)
                for (int64_t i = 0; i < D; i += W)
                    {{name}}_load(from + j * {{kernel.stride(k, 2)}} + i).store(wide + j * D + i);
            at::vec::transpose_mxn<float>(wide, D, turned, W, count, D);
{%- endif %}
            {{name}}_product(rows, queries, inputs, turned, W, inputs, scores.get() + s, padded);
        }
        for (int64_t row = 0; row < rows; ++row) {
            float* const weights = scores.get() + row * padded;
{%- if "bias" in inputs %}
            const int64_t query = (first + row) % T;
            const auto from = {{at(bias, "batch", "0", "query")}};
{%- endif %}
            for (int64_t s = 0; s < S; s += W) {
                const Vec score = Vec::loadu(weights + s) * Vec({{scale}}f);
{%- if "bias" in inputs %}
                (score + {{name}}_load(from + s, std::min(W, S - s))).store(weights + s);
{%- else %}
                score.store(weights + s);
{%- endif %}
            }
            std::fill(weights + S, weights + padded, -std::numeric_limits<float>::infinity());
            Vec most(-std::numeric_limits<float>::infinity()), sum(0.0f);
            for (int64_t s = 0; s < padded; s += W) most = at::vec::maximum(most, Vec::loadu(weights + s));
            const Vec top(at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, most));
            for (int64_t s = 0; s < padded; s += W) {
                const Vec weight = (Vec::loadu(weights + s) - top).{{exp}}();
                weight.store(weights + s);
                sum = sum + weight;
            }
            shares[row] = 1.0f / at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum);
        }
        for (int64_t i = 0; i < E; i += W) {
            {{name}}_product(rows, scores.get(), padded, value + i, {{kernel.stride(v, 2)}}, S, sums, W);
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t head = group * R + (first + row) / T, query = (first + row) % T;
                const auto to = {{at(out, "batch", "head", "query")}} + i;
                const Vec sum = Vec::loadu(sums + row * W) * Vec(shares[row]);
{%- if kernel.dtype(out) == "float" %}
                sum.store(to);
{%- else %}
                at::vec::convert<{{kernel.dtype(out)}}>(sum).store(to, W);
{%- endif %}
            }
        }
    }
}
"""


class FewQueries(CppTemplate):
    """The kernel for the shapes of one place in a graph; the number of keys may be a symbol.

    Args:
        inputs: queries (B, h, T, d), keys (B, g, S, d), values (B, g, S, e) and, if there is one, what is added to the
            scores, (B or 1, 1, T, S); d and e are multiples of a vector's width.
        layout: of the output, (B, h, T, e).
    """

    def __init__(self, inputs: list[Any], layout: FixedLayout, scale: float) -> None:
        super().__init__("few_queries", inputs, layout, parallel_num_threads())
        q, k = inputs[:2]
        self.scale = scale
        able = pairs.known() and isinstance(pick_vec_isa(), VecAVX512)
        whole = int(k.get_stride()[2]) % 2 == 0  # keys begin where a pair does
        self.pairs = able and whole and q.get_dtype() == k.get_dtype() == torch.bfloat16

    def render(self, kernel: CppTemplateKernel, template_buffer_node: Any = None, **_: Any) -> str:  # type: ignore[override]
        named = dict(zip(("q", "k", "v", "bias"), self.input_nodes, strict=False))

        def at(node: Any, *indices: str) -> str:
            """Where the last dimension begins."""
            steps = [f"{i} * {kernel.stride(node, n)}" for n, i in enumerate(indices) if node.get_size()[n] != 1]
            return " + ".join([f"&{kernel.index(node, [0] * 4)}", *steps])

        B, h, T, d = (int(n) for n in named["q"].get_size())
        g, e = (int(named[x].get_size()[n]) for x, n in (("k", 1), ("v", 3)))
        shapes = {"B": B, "g": g, "r": h // g, "T": T, "d": d, "e": e, "rows": ROWS}
        own = {"inputs": named, "out": template_buffer_node or self.output_node, "at": at, "scale": float(self.scale)}
        code = {"template": self, "kernel": kernel, "name": kernel.kernel_name, "threads": self.num_threads}
        # 16 bits do not show the last of float32's
        code |= {"pairs": self.pairs, "exp": "exp" if named["v"].get_dtype() == torch.float32 else "exp_u20"}
        return str(self._template_from_string(SOURCE).render(**named, **shapes, **own, **code))


def lower(q: TensorBox, k: TensorBox, v: TensorBox, bias: TensorBox | None, scale: float) -> TensorBox:
    """``attend_fused`` in inductor's terms; in memory the heads of a query stand side by side."""
    inputs = [_in_order(x) for x in (q, k, v, bias) if x is not None]
    (B, h, T, _), e = q.get_size(), v.get_size()[3]
    layout = FixedLayout(q.get_device_or_error(), v.get_dtype(), [B, h, T, e], [T * h * e, e, h * e, 1])
    choice = FewQueries(inputs, layout, scale).generate()
    out = CppTemplateBuffer(layout, inputs, choice.make_kernel_render, choice.template, choice)
    out.allow_epilogue_fusion = False  # what follows it would be left to the kernel, which does not write it
    return TensorBox.create(out)


def _in_order(x: TensorBox) -> Any:
    """In memory, its last dimension without gaps."""
    realized = ExternKernel.realize_input(x)
    as_storage_and_layout(realized, freeze=True)  # its strides could still change
    return realized if realized.get_stride()[-1] == 1 else ExternKernel.require_contiguous(realized)


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Inside, compilation makes the kernel of every ``attend_fused``, where there are vectors."""
    lowered = {torch.ops.specdec.attend_fused.default: lower} if pick_vec_isa() else {}
    with patch.dict(torch._inductor.lowering.lowerings, lowered):
        yield
