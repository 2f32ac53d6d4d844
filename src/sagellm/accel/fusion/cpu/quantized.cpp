// y = x W^T + bias for weights in 8 or 4 bits with scales in float16 or float32; x and y are float32, bfloat16 or
// float16.
// x is quantized too: each row by groups of 32 inputs, to integers of 8 or 16 bits and a scale. The arithmetic is the
// same for any number of rows, so a row's result does not depend on other rows. 16 bits are a high and a low byte:
// twice the products, which cost no time while W comes from memory.
// W lies in panels of 16 outputs, a panel group by group. A group has a vector for each four of its 32 inputs: 16 times
// four codes. Two 4-bit codes share a byte: fours 0 to 3 in the low halves, 4 to 7 in the high.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>

#include "grouped.h"
#include "integers.h"
#include "interface.h"
#include "scratch.h"

#define UNROLL _Pragma("GCC unroll 24")

// W[n, k] is (code - zero) scale. `scales` and `zeros` are [panels, scale groups, 16]; null zeros are the middle of the
// codes. A scale holds for `groups_per_scale` groups of 32. Input k of the codes is column `order[k]` of x, or k
// without an order.
struct Matrix {
    const uint8_t *codes;
    const void *scales;
    const uint8_t *zeros;
    const int32_t *order;
    int64_t outputs, inputs, groups_per_scale;
    int32_t scale_type, bits, activation_bits;
};

// Strides are in elements. y is [rows, outputs], of x's type or float32; bias has x's type or is null.
struct Rows {
    const Matrix *matrix;
    const void *x;
    const void *bias;
    void *y;
    int64_t rows, x_row_stride, x_column_stride;
    int32_t x_type, y_type;
};

// Several matrices of `outputs`, one below another: rows [starts[e], starts[e + 1]) meet the e-th. bias is [matrices,
// outputs].
struct Groups {
    const int64_t *starts;
    int64_t matrices, outputs;
    Rows rows;
};

// A product as one group: `outputs` are those of one matrix.
struct Quantized : Matrix, Rows {
    const int64_t *starts;
    int64_t matrices;
};

namespace quantized {

constexpr int64_t GROUP = 32, PANEL = 16, PARTS = PANEL / WIDTH, FOURS = GROUP / 4;
constexpr int64_t MOST_ROWS = 64;  // rows of a block, for which a panel's codes are unpacked once
constexpr int64_t PANELS_PER_TASK = 4;
constexpr int64_t AHEAD = 8192;     // bytes: a hint, which may point past the end

// One group of one row of x.
struct Factor {
    float scale;
    int32_t minus_sum;
};

// x as the kernel reads it: blocks of rows; in a block groups; in a group rows; in a row high bytes, then low bytes.
struct Packed {
    int8_t *codes;
    Factor *factors;
};

inline int64_t groups_of(const Quantized &job) { return (job.inputs + GROUP - 1) / GROUP; }

struct Eight {
    static constexpr int64_t BYTES = FOURS * 4 * PANEL;
    static constexpr int32_t ZERO = 128;
    static void load(const uint8_t *from, Bytes (&to)[FOURS]) {
        UNROLL for (int64_t i = 0; i < FOURS; i++) to[i] = load_bytes(from + i * 4 * PANEL);
    }
};

struct Four {
    static constexpr int64_t BYTES = Eight::BYTES / 2;
    static constexpr int32_t ZERO = 8;
    static void load(const uint8_t *from, Bytes (&to)[FOURS]) {
        UNROLL for (int64_t i = 0; i < FOURS / 2; i++) {
            const Bytes both = load_bytes(from + i * 4 * PANEL);
            to[i] = low_halves(both);
            to[i + FOURS / 2] = high_halves(both);
        }
    }
};

// Computes the sums of a panel for a block of rows: `sums` is [rows, 16].
template <typename Form, typename Scale, int XBYTES>
void panel(const Quantized &job, const Packed &x, int64_t rows, int64_t index, float *sums) {
    const int64_t groups = groups_of(job), per = job.groups_per_scale, scale_groups = (groups + per - 1) / per;
    const uint8_t *codes = job.codes + index * groups * Form::BYTES;
    const Scale *scales = static_cast<const Scale *>(job.scales) + index * scale_groups * PANEL;
    const uint8_t *zeros = job.zeros ? job.zeros + index * scale_groups * PANEL : nullptr;
    std::fill(sums, sums + rows * PANEL, 0.0f);
    for (int64_t g = 0, left = per; g < groups; g++, codes += Form::BYTES) {
        for (int64_t i = 0; i < Form::BYTES; i += 64)
            __builtin_prefetch(reinterpret_cast<const void *>(uintptr_t(codes) + uintptr_t(AHEAD + i)));
        for (int64_t part = 0; part < PARTS; part++) {
            Bytes w[FOURS];
            Form::load(codes + part * 4 * WIDTH, w);
            const Vector scale = load(scales + part * WIDTH);
            const Ints zero = zeros ? widened(zeros + part * WIDTH) : all_ints(Form::ZERO);
            const Factor *factor = x.factors + g * rows;
            const int8_t *from = x.codes + g * rows * GROUP * XBYTES;
            float *to = sums + part * WIDTH;
            for (int64_t row = 0; row < rows; row++, factor++, from += GROUP * XBYTES, to += PANEL) {
                Ints sum = product(zero, all_ints(factor->minus_sum));
                if constexpr (XBYTES == 2) {
                    Ints high = all_ints(0);
                    UNROLL for (int64_t i = 0; i < FOURS; i++) high = dot(w[i], from + 4 * i, high);
                    sum = sum_of(sum, product(high, all_ints(256)));
                }
                const int8_t *low = from + GROUP * (XBYTES - 1);
                UNROLL for (int64_t i = 0; i < FOURS; i++) sum = dot(w[i], low + 4 * i, sum);
                save(to, multiply_add(floats(sum), multiply(scale, all(factor->scale)), load(to)));
            }
        }
        if (--left == 0) left = per, scales += PANEL, zeros = zeros ? zeros + PANEL : zeros;
    }
}

// Quantizes one group of a row: its largest value becomes 127 steps, or 127 x 256. A NaN or an infinity makes the scale
// NaN, and with it all sums of the row.
template <int XBYTES>
Factor quantize(const float *values, int8_t *codes) {
    Vector most = zero(), finite = zero();
    for (int64_t i = 0; i < GROUP; i += WIDTH) {
        const Vector v = load(values + i);
        most = greater_of(greater_of(v, difference(zero(), v)), most);
        finite = multiply_add(v, zero(), finite);
    }
    const float amax = greatest_of(most);
    if (total(finite) != 0.0f) {
        std::memset(codes, 0, GROUP * XBYTES);
        return {NAN, 0};
    }
    constexpr float STEPS = XBYTES == 2 ? 127.0f * 256.0f : 127.0f;
    const Vector inverse = all(amax > 1e-30f ? STEPS / amax : 0.0f);
    Vector sum = zero();
    for (int64_t i = 0; i < GROUP; i += WIDTH) {
        const Vector whole = nearest(multiply(load(values + i), inverse));
        sum = difference(sum, whole);
        if constexpr (XBYTES == 2) {  // the low byte is -128 to 127: half a step up, so that 128 is not a tie
            const Vector high = nearest(multiply_add(whole, all(1.0f / 256), all(1.0f / 512)));
            save_bytes(codes + i, high);
            save_bytes(codes + GROUP + i, multiply_add(high, all(-256.0f), whole));
        } else {
            save_bytes(codes + i, whole);
        }
    }
    return {amax / STEPS, int32_t(total(sum))};
}

template <typename X>
void values_of(const Quantized &job, int64_t row, int64_t first, float *to) {
    const X *from = static_cast<const X *>(job.x) + row * job.x_row_stride;
    const int64_t left = job.inputs - first;
    if (left >= GROUP && job.x_column_stride == 1 && !job.order) {
        for (int64_t i = 0; i < GROUP; i += WIDTH) save(to + i, load(from + first + i));
        return;
    }
    for (int64_t i = 0; i < GROUP; i++) {
        const int64_t k = i < left ? first + i : 0;
        to[i] = i < left ? as_float(from[(job.order ? job.order[k] : k) * job.x_column_stride]) : 0.0f;
    }
}

// The rows of a block, of one matrix.
struct Block {
    int64_t first, rows;
};

inline Block block_of(const Quantized &job, int64_t row) {
    const int64_t *end = std::upper_bound(job.starts, job.starts + job.matrices, row), start = end[-1];
    const int64_t first = start + (row - start) / MOST_ROWS * MOST_ROWS;
    return {first, std::min(MOST_ROWS, *end - first)};
}

template <int XBYTES>
Packed block(const Quantized &job, const Packed &x, int64_t first) {
    return {x.codes + first * groups_of(job) * GROUP * XBYTES, x.factors + first * groups_of(job)};
}

template <typename X, int XBYTES>
void pack_row(const Quantized &job, int64_t row, const Packed &x) {
    const auto [first, rows] = block_of(job, row);
    const Packed to = block<XBYTES>(job, x, first);
    for (int64_t g = 0; g < groups_of(job); g++) {
        float values[GROUP];
        values_of<X>(job, row, g * GROUP, values);
        const int64_t place = g * rows + row - first;
        to.factors[place] = quantize<XBYTES>(values, to.codes + place * GROUP * XBYTES);
    }
}

template <typename X, typename Y>
void finish(const Quantized &job, const GroupedTasks &at, int64_t index, const float *sums) {
    const int64_t begin = std::max(at.begin(), index * PANEL), end = std::min(at.end(), (index + 1) * PANEL);
    for (int64_t row = 0; row < at.rows; row++)
        for (int64_t output = begin; output < end; output++) {
            const float value = sums[row * PANEL + output - index * PANEL];
            const float bias = job.bias ? as_float(static_cast<const X *>(job.bias)[output]) : 0.0f;
            round_to(value + bias, static_cast<Y *>(job.y)[(at.first + row) * job.outputs + output - at.begin()]);
        }
}

// Threads take tasks one by one, so a thread that another process delays takes fewer.
template <typename Task>
void shared_out(int64_t tasks, int32_t threads, const Task &task) {
    std::atomic<int64_t> next{0};
    threads::together(threads, [&] {
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(i);
    });
}

// Returns false if there is no memory for the packed rows.
template <typename Form, typename Scale, int XBYTES, typename X>
bool run(const Quantized &job, int32_t threads) {
    static thread_local Scratch code_scratch, factor_scratch;
    const size_t groups = size_t(job.rows * groups_of(job));
    const Packed x = {static_cast<int8_t *>(code_scratch.at_least(groups * GROUP * XBYTES)),
                      static_cast<Factor *>(factor_scratch.at_least(groups * sizeof(Factor)))};
    if (groups && !(x.codes && x.factors)) return false;
    shared_out(job.rows, job.rows < 4 ? 1 : threads, [&](int64_t row) { pack_row<X, XBYTES>(job, row, x); });
    std::atomic<int64_t> next{0};
    threads::together(threads, [&] {
        GroupedTasks at(job.starts, job.matrices, job.outputs, PANEL * PANELS_PER_TASK, MOST_ROWS);
        alignas(64) float sums[MOST_ROWS * PANEL];
        while (at.move_to(next.fetch_add(1))) {
            const int64_t begin = std::max(at.panel * PANELS_PER_TASK, at.begin() / PANEL);
            const int64_t end = std::min((at.panel + 1) * PANELS_PER_TASK, (at.end() + PANEL - 1) / PANEL);
            for (int64_t index = begin; index < end; index++) {
                panel<Form, Scale, XBYTES>(job, block<XBYTES>(job, x, at.first), at.rows, index, sums);
                job.y_type == FLOAT32 ? finish<X, float>(job, at, index, sums) : finish<X, X>(job, at, index, sums);
            }
        }
    });
    return true;
}

}  // namespace quantized

namespace {

template <typename Form, typename Scale, int XBYTES>
int32_t by_x(const Quantized &job, int32_t threads) {
    if (job.y_type != job.x_type && job.y_type != FLOAT32) return NO_KERNEL;
    switch (job.x_type) {
        case FLOAT32: return quantized::run<Form, Scale, XBYTES, float>(job, threads) ? DONE : NO_MEMORY;
        case BFLOAT16: return quantized::run<Form, Scale, XBYTES, BFloat16>(job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return quantized::run<Form, Scale, XBYTES, Float16>(job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}

template <typename Form, int XBYTES>
int32_t by_scale(const Quantized &job, int32_t threads) {
    switch (job.scale_type) {
        case FLOAT32: return by_x<Form, float, XBYTES>(job, threads);
        case FLOAT16: return by_x<Form, Float16, XBYTES>(job, threads);
        default: return NO_KERNEL;
    }
}

int32_t multiply(const Quantized &job, int32_t threads) {
    switch (job.bits * 100 + job.activation_bits) {
        case 816: return by_scale<quantized::Eight, 2>(job, threads);
        case 808: return by_scale<quantized::Eight, 1>(job, threads);
        case 416: return by_scale<quantized::Four, 2>(job, threads);
        case 408: return by_scale<quantized::Four, 1>(job, threads);
        default: return NO_KERNEL;
    }
}

}  // namespace

extern "C" {

// The matrix is a structure of its own because it is the same in every call.
EXPORTED int32_t sagellm_linear_quantized(const Rows *rows, int32_t threads) {
    if (rows->rows <= 0 || rows->matrix->outputs <= 0) return DONE;
    const int64_t starts[] = {0, rows->rows};
    return multiply({*rows->matrix, *rows, starts, 1}, threads);
}

EXPORTED int32_t sagellm_grouped_quantized(const Groups *groups, int32_t threads) {
    const Rows &rows = groups->rows;
    if (rows.rows <= 0 || groups->outputs <= 0) return DONE;
    if (!are_starts(groups->starts, groups->matrices, rows.rows)) return BAD_INDEX;
    Quantized job = {*rows.matrix, rows, groups->starts, groups->matrices};
    job.outputs = groups->outputs;
    return multiply(job, threads);
}

}  // extern "C"
