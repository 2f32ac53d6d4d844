// Few rows: every row of the weight comes from memory once, as a vector along the inputs, and meets all rows of x
// while it is in registers or L1. At one to about eight rows reading the weight is all that costs.

#pragma once
#include <atomic>

#include "form.h"
#include "threads.h"

namespace few_rows {

constexpr int64_t MOST_TILE_ROWS = 8;
constexpr int64_t OUTPUTS_PER_TASK = 48;

// Equal tiles, as few as hold all rows; sizes that no kernel is made for are filled up with zero rows.
int64_t tile_rows(int64_t rows) {
    const int64_t tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
    const int64_t even = (rows + tiles - 1) / tiles;
    return even <= 2 ? even : (even + 1) / 2 * 2;
}

int64_t padded_rows(int64_t rows) { return (rows + tile_rows(rows) - 1) / tile_rows(rows) * tile_rows(rows); }

// So that sums, weights and one step of x stay in registers: 32 with AVX-512, else 16.
constexpr int tile_outputs(int rows) {
    if (WIDTH < 16) return rows <= 4 ? 2 : 1;
    return rows <= 4 ? 4 : 3;
}

// The scalar products of ROWS packed rows of x with the OUTPUTS weight rows at `from`.
template <typename Form, int ROWS, int OUTPUTS>
void tile(const typename Form::Packed *x, const typename Form::Weight *const (&from)[OUTPUTS], const Linear &job,
          float (&products)[ROWS][OUTPUTS]) {
    typedef typename Form::Weight Weight;
    typedef typename Form::Operand Operand;
    const int64_t whole = job.inputs / Form::STEP * Form::STEP;
    const uintptr_t next_tile = uintptr_t(job.weight_stride) * OUTPUTS * sizeof(Weight);
    Vector sum[ROWS][OUTPUTS];
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int n = 0; n < OUTPUTS; n++) sum[m][n] = zero();
    for (int64_t k = 0; k < whole; k += Form::STEP, x += ROWS * Form::STEP) {
        Operand w[OUTPUTS];
        UNROLL for (int n = 0; n < OUTPUTS; n++) {
            // A hint, which may point past the end.
            __builtin_prefetch(reinterpret_cast<const void *>(uintptr_t(from[n] + k) + next_tile));
            w[n] = Form::weights(from[n] + k);
        }
        UNROLL for (int m = 0; m < ROWS; m++) {
            const Operand v = Form::packed(x + m * Form::STEP);
            UNROLL for (int n = 0; n < OUTPUTS; n++) sum[m][n] = Form::multiply_add(v, w[n], sum[m][n]);
        }
    }
    if (whole < job.inputs) {
        UNROLL for (int n = 0; n < OUTPUTS; n++) {
            const Operand w = weights_of<Form>(from[n] + whole, job.inputs - whole);
            UNROLL for (int m = 0; m < ROWS; m++)
                sum[m][n] = Form::multiply_add(Form::packed(x + m * Form::STEP), w, sum[m][n]);
        }
    }
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int n = 0; n < OUTPUTS; n++) products[m][n] = total(sum[m][n]);
}

// Outputs [first, last) of all rows. All rows meet a tile's weights before the next tile's are read.
template <typename Form, typename X, int ROWS>
void task(const typename Form::Packed *x, const Linear &job, int64_t first, int64_t last) {
    constexpr int OUTPUTS = tile_outputs(ROWS);
    for (; first < last; first += OUTPUTS) {
        const int64_t count = last - first < OUTPUTS ? last - first : OUTPUTS;
        const typename Form::Weight *from[OUTPUTS];
        for (int64_t n = 0; n < OUTPUTS; n++)
            from[n] = static_cast<const typename Form::Weight *>(job.weight) +
                      (first + (n < count ? n : count - 1)) * job.weight_stride;
        for (int64_t row = 0; row < job.rows; row += ROWS) {
            float products[ROWS][OUTPUTS];
            tile<Form, ROWS, OUTPUTS>(x + row * padded_inputs<Form>(job), from, job, products);
            for (int64_t m = 0; m < ROWS && row + m < job.rows; m++)
                for (int64_t n = 0; n < count; n++) store<X>(job, row + m, first + n, products[m][n]);
        }
    }
}

template <typename Form, typename X>
void tasks(const typename Form::Packed *x, const Linear &job, int64_t first, int64_t last) {
    switch (tile_rows(job.rows)) {
        case 1: return task<Form, X, 1>(x, job, first, last);
        case 2: return task<Form, X, 2>(x, job, first, last);
        case 4: return task<Form, X, 4>(x, job, first, last);
        case 6: return task<Form, X, 6>(x, job, first, last);
        default: return task<Form, X, 8>(x, job, first, last);
    }
}

// x as the kernel reads it: tile by tile, in a tile step by step, and in a step row by row. Rows that lie one
// behind the other would meet in the same few lines of L1 when their length is a power of two.
template <typename Form, typename X>
void pack(const Linear &job, typename Form::Packed *to) {
    const int64_t tile = tile_rows(job.rows), stride = job.x_column_stride;
    for (int64_t first = 0; first < job.rows; first += tile)
        for (int64_t k = 0; k < job.inputs; k += Form::STEP)
            for (int64_t row = first; row < first + tile; row++, to += Form::STEP) {
                const X *from = static_cast<const X *>(job.x) + row * job.x_row_stride + k * stride;
                const int64_t left = row < job.rows ? job.inputs - k : 0;
                if (left >= Form::STEP && stride == 1)  // both known to the compiler, which makes vectors of it
                    for (int64_t i = 0; i < Form::STEP; i++) as_packed(from[i], to[Form::place(i)]);
                else
                    for (int64_t i = 0; i < Form::STEP; i++)
                        as_packed(i < left ? from[i * stride] : X{}, to[Form::place(i)]);
            }
}

// False where there is no memory for the packed rows.
template <typename Form, typename X>
bool run(const Linear &job, int32_t threads) {
    static thread_local Scratch scratch;
    const size_t elements = size_t(padded_rows(job.rows) * padded_inputs<Form>(job));
    auto *x = static_cast<typename Form::Packed *>(scratch.at_least(elements * sizeof(typename Form::Packed)));
    if (elements && !x) return false;
    pack<Form, X>(job, x);
    std::atomic<int64_t> next{0};
    // Tasks are taken, not dealt: a thread that another process holds up takes fewer.
    threads::together(threads, [&] {
        for (int64_t first; (first = next.fetch_add(OUTPUTS_PER_TASK)) < job.outputs;) {
            const int64_t left = job.outputs - first;
            tasks<Form, X>(x, job, first, first + (left < OUTPUTS_PER_TASK ? left : OUTPUTS_PER_TASK));
        }
    });
    return true;
}

}  // namespace few_rows
