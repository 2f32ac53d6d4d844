// What both linear kernels work on: the job, and the operands of one step.

#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "scratch.h"
#include "vector.h"

// y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias. Strides are in elements; the rows of the
// weight are contiguous; y and bias are of x's type; a null bias is none.
struct Linear {
    const void *x;
    const void *weight;
    const void *bias;
    void *y;
    int64_t rows, outputs, inputs;
    int64_t x_row_stride, x_column_stride, weight_stride, y_row_stride, y_column_stride;
    int32_t x_type, weight_type;
};

// An array that is indexed by a variable is not kept in registers: loops over sums are unrolled, all of them.
#define UNROLL _Pragma("GCC unroll 24")

// How the products of one step are made: both sides widened to float32. `Packed` is x as the kernel reads it.
template <typename W>
struct Floats {
    typedef W Weight;
    typedef float Packed;
    struct Operand {
        Vector low, high;
    };
    static constexpr int64_t STEP = 2 * WIDTH;
    static Operand packed(const float *from) { return {load(from), load(from + WIDTH)}; }
    static Operand weights(const W *from) { return {load(from), load(from + WIDTH)}; }
    static Vector multiply_add(Operand x, Operand w, Vector sum) {
        return ::multiply_add(x.high, w.high, ::multiply_add(x.low, w.low, sum));
    }
    static int64_t place(int64_t i) { return i; }
};

// A bfloat16 is the upper half of a float: shifting up the even elements and masking the odd ones is cheaper than
// widening neighbours. x is packed to match: the even elements of a step, then its odd ones.
template <>
inline Floats<BFloat16>::Operand Floats<BFloat16>::weights(const BFloat16 *from) {
    Operand both;
    load_even_odd(from, both.low, both.high);
    return both;
}
template <>
inline int64_t Floats<BFloat16>::place(int64_t i) {
    return i % 2 * WIDTH + i / 2;
}

#if defined(__AVX512BF16__)
// Pairs of bfloat16 products summed in float32 by one instruction: x stays bfloat16 and in order.
struct Pairs {
    typedef BFloat16 Weight;
    typedef BFloat16 Packed;
    typedef __m512bh Operand;
    static constexpr int64_t STEP = 2 * WIDTH;
    static Operand packed(const BFloat16 *from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Operand weights(const BFloat16 *from) { return packed(from); }
    static Vector multiply_add(Operand x, Operand w, Vector sum) { return _mm512_dpbf16_ps(sum, x, w); }
    static int64_t place(int64_t i) { return i; }
};
#endif

template <typename Form>
int64_t padded_inputs(const Linear &job) {
    return (job.inputs + Form::STEP - 1) / Form::STEP * Form::STEP;
}

// One step of the weight row at `from`, of which `left` inputs remain. Zeros stand where the row ends: what follows
// it may be anything, an inf too.
template <typename Form>
typename Form::Operand weights_of(const typename Form::Weight *from, int64_t left) {
    if (left >= Form::STEP) return Form::weights(from);
    typename Form::Weight tail[Form::STEP] = {};
    std::memcpy(tail, from, size_t(left) * sizeof *from);
    return Form::weights(tail);
}

inline void as_packed(BFloat16 value, BFloat16 &to) { to = value; }
template <typename X>
inline void as_packed(X value, float &to) {
    to = as_float(value);
}

template <typename X>
void store(const Linear &job, int64_t row, int64_t output, float value) {
    if (job.bias) value += as_float(static_cast<const X *>(job.bias)[output]);
    round_to(value, static_cast<X *>(job.y)[row * job.y_row_stride + output * job.y_column_stride]);
}
