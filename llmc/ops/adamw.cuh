// adamw.cuh: one step of AdamW (arXiv 1711.05101) in one pass over fp32 state.
//
//   g = grad_scale * grad        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   master -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * master)
//   param = master, rounded to nearest; param and master may be the same memory
#pragma once

#include "common.cuh"

namespace cpu {

template <typename X>
void adamw_update(X* param, float* master, float* m, float* v, const float* grad, i64 count, const AdamW& hyper, Run& run) {
    const float rest1 = 1.0f - hyper.beta1, rest2 = 1.0f - hyper.beta2;
    const float scale1 = 1.0f / hyper.correction1, scale2 = 1.0f / hyper.correction2;
    parallel_pieces(count, 32768, run, [&](i64 begin, i64 n) {
        vector_loop(n, [&](i64 j, auto lanes) {
            const i64 i = begin + j;
            const vfloat g = hyper.grad_scale * load(grad + i, lanes), old = load(master + i, lanes);
            const vfloat m_new = hyper.beta1 * load(m + i, lanes) + rest1 * g;
            const vfloat v_new = hyper.beta2 * load(v + i, lanes) + rest2 * (g * g);
            const vfloat step = (m_new * scale1) / (sqrt(v_new * scale2) + hyper.eps) + hyper.weight_decay * old;
            const vfloat value = old - hyper.lr * step;
            store(m + i, m_new, lanes);
            store(v + i, v_new, lanes);
            store(master + i, value, lanes);
            if ((void*)param != (void*)master) { store(param + i, value, lanes); }
        });
    });
}

}  // namespace cpu

template <typename X>
void adamw_update(X* param, float* master, float* m, float* v, const float* grad, i64 count, const AdamW& hyper, Run& run) {
    cpu::adamw_update(param, master, m, v, grad, count, hyper, run);
}
