"""Products of few rows in bfloat16, two numbers at a time (AVX512_BF16): inductor's own kernel would widen each first.

It is offered to inductor's C++ template, which packs the matrix in pairs and cuts it for the threads. Its sums are
float32's, of exact products; what is subnormal counts as zero.

Legend: M rows, N columns, K inputs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.lowering  # before what follows, which imports it in a circle
from torch._inductor.codegen import cpp_micro_gemm
from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemm, LayoutType, generate_gemm_config
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.cpu_vec_isa import VecAVX512VNNI
from torch._inductor.select_algorithm import KernelTemplate

ROWS, COLUMNS = 8, 32  # whose sums stay in registers

SOURCE = r"""
template <int64_t rows>
inline void {{kernel_name}}_block(
    const {{input_t}}* a, const {{input2_t}}* b, {{output_t}}* c,
    int64_t inputs, int64_t lda, int64_t ldb, int64_t ldc, bool accum
) {
    constexpr int64_t vectors = {{columns}} / 16;
    __m512 sums[rows][vectors];
    #pragma GCC unroll 16
    for (int64_t row = 0; row < rows; ++row)
        #pragma GCC unroll 16
        for (int64_t v = 0; v < vectors; ++v)
            sums[row][v] = accum ? _mm512_loadu_ps(c + row * ldc + 16 * v) : _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += 2) {
        __m512bh weights[vectors];
        #pragma GCC unroll 16
        for (int64_t v = 0; v < vectors; ++v)
            weights[v] = (__m512bh)_mm512_loadu_si512(b + k * ldb + 32 * v);
        #pragma GCC unroll 16
        for (int64_t row = 0; row < rows; ++row) {
            int pair;
            std::memcpy(&pair, a + row * lda + k, sizeof pair);
            #pragma GCC unroll 16
            for (int64_t v = 0; v < vectors; ++v)
                sums[row][v] = _mm512_dpbf16_ps(sums[row][v], (__m512bh)_mm512_set1_epi32(pair), weights[v]);
        }
    }
    #pragma GCC unroll 16
    for (int64_t row = 0; row < rows; ++row)
        #pragma GCC unroll 16
        for (int64_t v = 0; v < vectors; ++v)
            _mm512_storeu_ps(c + row * ldc + 16 * v, sums[row][v]);
}

{{declaration}} {
    for (int64_t m = 0; m < M; m += {{rows}}) {
        for (int64_t n = 0; n < N; n += {{columns}}) {
            const auto a = A + m * lda;
            const auto b = B + 2 * n;
            const auto c = C + m * ldc + n;
            switch (std::min<int64_t>(M - m, {{rows}})) {
{%- for row in range(1, rows + 1) %}
                case {{row}}: {{kernel_name}}_block<{{row}}>(a, b, c, K, lda, ldb, ldc, accum); break;
{%- endfor %}
            }
        }
    }
}
"""


class Pairs(CppMicroGemm):
    """The product of an (M, K) and a packed (K, N), N a multiple of ``COLUMNS``; float32."""

    def codegen_define(self, kernel: CppTemplateKernel) -> str:
        if self.pack_vnni_B_locally:
            raise NotImplementedError("only of matrices that are packed before they are used")  # it is dropped then
        own = {"declaration": self.get_kernel_declaration(), "rows": ROWS, "columns": COLUMNS}
        return str(KernelTemplate._template_from_string(SOURCE).render(own | self.get_common_options()))

    def get_b_layout(self) -> LayoutType:
        return LayoutType.VNNI2


def able() -> bool:
    """Whether this processor multiplies pairs, and no tiles (AMX), for which inductor has a kernel."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") and found.get("avx512_vnni")) and not found.get("amx_bf16")


def known() -> bool:
    """Whether compilation knows the kernel now."""
    return Pairs in cpp_micro_gemm.micro_gemm_configs


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Inside, compilation knows the kernel."""
    cpp_micro_gemm.micro_gemm_configs[Pairs] = generate_gemm_config(
        VecAVX512VNNI,
        [(ROWS, COLUMNS, 2)],
        input_dtype=torch.bfloat16,
        output_dtype=torch.float32,
        extra_check=_serves,
    )
    try:
        yield
    finally:
        del cpp_micro_gemm.micro_gemm_configs[Pairs]


def _serves(config: Any, m: int, n: int, k: int, alpha: float, threads: int, **_: Any) -> bool:
    return k % 2 == 0 and alpha == 1
