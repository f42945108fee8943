// adamw.cuh: one step of AdamW (arXiv 1711.05101) in one pass over fp32 state.
//
//   g = grad_scale * grad        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   master -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * master)
//   param = master, rounded as hyper.rounding says (rounding.h)
//
// A bf16 parameter's master weight is the parameter with `low`, the 16 bits that its rounding cut off; an fp32 parameter is its own.
#pragma once

#include "common.cuh"

#ifndef LLMC_KERNELS
namespace cpu {

template <typename X>
void adamw_update(X* param, uint16_t* low, float* m, float* v, Gradient gradient, i64 count, const AdamW& hyper, Run& run) {
    const float rest1 = 1.0f - hyper.beta1, rest2 = 1.0f - hyper.beta2;
    const float scale1 = 1.0f / hyper.correction1, scale2 = 1.0f / hyper.correction2;
    gradient.visit<X>([&](const auto* grad) {
        parallel_pieces(count, 32768, run, [&](i64 begin, i64 n) {
            vector_loop(n, [&](i64 j, auto lanes) {
                const i64 i = begin + j;
                const vuint index = (vuint)lane_numbers() + (uint32_t)(hyper.first + i);
                const vfloat g = hyper.grad_scale * load(ahead(grad + i), lanes);
                vfloat old = load(ahead(param + i), lanes);
                if constexpr (!std::is_same_v<X, float>) { old = (vfloat)hyper.rounded_by.restore((vuint)old, load(ahead(low + i), lanes), index); }
                const vfloat m_new = hyper.beta1 * load(ahead(m + i), lanes) + rest1 * g;
                const vfloat v_new = hyper.beta2 * load(ahead(v + i), lanes) + rest2 * (g * g);
                const vfloat step = (m_new * scale1) / (sqrt(v_new * scale2) + hyper.eps) + hyper.weight_decay * old;
                const vfloat value = old - hyper.lr * step;
                store(m + i, m_new, lanes);
                store(v + i, v_new, lanes);
                if constexpr (std::is_same_v<X, float>) {
                    store(param + i, value, lanes);
                } else {
                    store(low + i, (vuint)value, lanes);
                    store(param + i, (vfloat)hyper.rounding.round((vuint)value, index), lanes);
                }
            });
        });
    });
}

}  // namespace cpu

#else
namespace gpu {

template <typename X, typename G, int W>
__global__ void __launch_bounds__(THREADS) adamw_kernel(X* __restrict__ param, uint16_t* __restrict__ low, float* __restrict__ m, float* __restrict__ v,
                                                        const G* __restrict__ grad, i64 count, AdamW hyper) {
    const float rest1 = 1.0f - hyper.beta1, rest2 = 1.0f - hyper.beta2;
    const float scale1 = 1.0f / hyper.correction1, scale2 = 1.0f / hyper.correction2;
    constexpr bool split = !std::is_same_v<X, float>;
    flat_loop<W>(count, [&](i64 i, auto width) {
        const Floats<width> g = load<width>(grad + i);
        Floats<width> halves{};  // numbers below 2^16: exact
        if constexpr (split) { halves = load<width>(low + i); }
        Floats<width> value = load<width>(param + i), m_new = load<width>(m + i), v_new = load<width>(v + i);
        for (int j = 0; j < width; j++) {
            if constexpr (split) { value[j] = hyper.rounded_by.master(value[j], (uint16_t)halves[j], hyper.first + i + j); }
            const float scaled = hyper.grad_scale * g[j];
            m_new[j] = hyper.beta1 * m_new[j] + rest1 * scaled;
            v_new[j] = hyper.beta2 * v_new[j] + rest2 * (scaled * scaled);
            const float step = (m_new[j] * scale1) / (sqrtf(v_new[j] * scale2) + hyper.eps) + hyper.weight_decay * value[j];
            value[j] -= hyper.lr * step;
            if constexpr (split) { halves[j] = lower_half(value[j]), value[j] = hyper.rounding(value[j], hyper.first + i + j); }
        }
        store(m + i, m_new);
        store(v + i, v_new);
        if constexpr (split) { store(low + i, halves); }
        store(param + i, value);
    });
}

template <typename X>
void adamw_update(X* param, uint16_t* low, float* m, float* v, Gradient gradient, i64 count, const AdamW& hyper, Run& run) {
    gradient.visit<X>([&]<typename G>(const G* grad) {
        const int W = widest<float>;
        const bool wide = rows_aligned(W, param, 0) && rows_aligned(W, low, 0) && rows_aligned(W, m, 0) && rows_aligned(W, v, 0) &&
                          rows_aligned(W, grad, 0);
        with_width<float>(wide, [&](auto width) {
            launch(adamw_kernel<X, G, width>, flat_shape(count, width), run, param, low, m, v, grad, count, hyper);
        });
    });
}

}  // namespace gpu
#endif
