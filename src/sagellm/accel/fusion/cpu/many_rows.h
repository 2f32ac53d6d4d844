// Many rows: vectors lie along the rows of x, and a weight is one number for all of them. Work goes by chunks of
// rows and inputs whose part of x stays in L2; for each, weights are widened to float32 tile by tile, once for the
// whole chunk, into a buffer that nearly fits L1 (the blocking of Goto and van de Geijn, 2008).

#pragma once
#include <atomic>

#include "form.h"
#include "threads.h"

namespace many_rows {

constexpr int64_t CHUNK_BYTES = 512 << 10;
constexpr int64_t CHUNK_INPUTS = 1024;
constexpr int64_t STEPS_PER_TASK = 16;
constexpr int64_t OUTPUTS_PER_TASK = 96;
// Sums that fill the registers but for one step's operands: 32 with AVX-512, else 16.
constexpr int SUMS = WIDTH == 16 ? 24 : 12;

// The weights of the next tile, which come from memory while this one is computed.
struct Ahead {
    uintptr_t at;
    uintptr_t row_bytes, step_bytes;
};

// The sums of VECTORS x WIDTH rows and OUTPUTS outputs; x has LANES rows side by side.
template <int VECTORS, int LANES, int OUTPUTS, int64_t STEP>
void block(const float *x, const float *weights, int64_t inputs, Ahead ahead,
           float (&sums)[OUTPUTS][VECTORS * WIDTH]) {
    Vector sum[OUTPUTS][VECTORS];
    UNROLL for (int n = 0; n < OUTPUTS; n++) UNROLL for (int v = 0; v < VECTORS; v++) sum[n][v] = zero();
    for (int64_t k = 0; k < inputs; k += STEP, weights += OUTPUTS * STEP, ahead.at += ahead.step_bytes) {
        if (ahead.step_bytes)
            for (int n = 0; n < OUTPUTS; n++)
                __builtin_prefetch(reinterpret_cast<const void *>(ahead.at + uintptr_t(n) * ahead.row_bytes));
#pragma GCC unroll 4
        for (int64_t i = 0; i < STEP; i++, x += LANES) {
            Vector rows[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) rows[v] = load(x + v * WIDTH);
            UNROLL for (int n = 0; n < OUTPUTS; n++) {
                const Vector weight = all(weights[n * STEP + i]);
                UNROLL for (int v = 0; v < VECTORS; v++) sum[n][v] = multiply_add(rows[v], weight, sum[n][v]);
            }
        }
    }
    UNROLL for (int n = 0; n < OUTPUTS; n++) UNROLL for (int v = 0; v < VECTORS; v++)
        std::memcpy(&sums[n][v * WIDTH], &sum[n][v], sizeof(Vector));
}

// What one tile takes part in: rows [first_row, last_row), inputs [first_input, first_input + inputs), padded.
struct Chunk {
    int64_t first_row, last_row, first_input, inputs;
};

// A tile's outputs, from `output` on, for the lanes whose first row is `row`. The first inputs set y, others add.
template <int VECTORS, int LANES, int OUTPUTS, int64_t STEP>
void outputs_of(const float *x, const float *weights, const Linear &job, const Chunk &chunk, Ahead ahead, int64_t row,
                int64_t output) {
    float sums[OUTPUTS][VECTORS * WIDTH];
    block<VECTORS, LANES, OUTPUTS, STEP>(x, weights, chunk.inputs, ahead, sums);
    const int64_t rows = job.rows - row < VECTORS * WIDTH ? job.rows - row : VECTORS * WIDTH;
    for (int64_t n = 0; n < OUTPUTS && output + n < job.outputs; n++) {
        float *y = static_cast<float *>(job.y) + row * job.y_row_stride + (output + n) * job.y_column_stride;
        const float start = job.bias && !chunk.first_input ? static_cast<const float *>(job.bias)[output + n] : 0.0f;
        for (int64_t i = 0; i < rows; i++) {
            float *to = y + i * job.y_row_stride;
            *to = sums[n][i] + (chunk.first_input ? *to : start);
        }
    }
}

// OUTPUTS rows of the weight as floats, step by step, and in a step output by output.
template <typename Form, int OUTPUTS>
void widen(const Linear &job, const Chunk &chunk, int64_t output, float *to) {
    const auto *weight = static_cast<const typename Form::Weight *>(job.weight);
    for (int64_t k = chunk.first_input; k < chunk.first_input + chunk.inputs; k += Form::STEP)
        for (int64_t n = output; n < output + OUTPUTS; n++, to += Form::STEP) {
            const int64_t row = n < job.outputs ? n : job.outputs - 1;
            const typename Form::Operand both = weights_of<Form>(weight + row * job.weight_stride + k, job.inputs - k);
            std::memcpy(to, &both.low, sizeof both.low);
            std::memcpy(to + WIDTH, &both.high, sizeof both.high);
        }
}

// Step `k` of LANES rows of x from `first` on, input by input in the order of the weights; zeros where x ends.
template <typename Form, int LANES>
void pack(const Linear &job, int64_t first, int64_t k, float *to) {
    const float *x = static_cast<const float *>(job.x) + first * job.x_row_stride + k * job.x_column_stride;
    const int64_t rows = job.rows - first < LANES ? job.rows - first : LANES;
    const int64_t inputs = job.inputs - k < Form::STEP ? job.inputs - k : Form::STEP;
    if (rows < LANES || inputs < Form::STEP) std::memset(to, 0, sizeof(float) * LANES * Form::STEP);
    for (int64_t i = 0; i < inputs; i++) {
        float *lane = to + Form::place(i) * LANES;
        for (int64_t row = 0; row < rows; row++) lane[row] = x[row * job.x_row_stride + i * job.x_column_stride];
    }
}

// One tile's part of a chunk: `x` is packed, all of it; `weights` is the tile's buffer.
template <typename Form, int VECTORS>
void tile(const float *x, float *weights, const Linear &job, const Chunk &chunk, int64_t output) {
    constexpr int LANES = VECTORS * WIDTH, OUTPUTS = SUMS / VECTORS;
    typedef typename Form::Weight Weight;
    widen<Form, OUTPUTS>(job, chunk, output, weights);
    const uintptr_t row_bytes = uintptr_t(job.weight_stride) * sizeof(Weight);
    const uintptr_t next = uintptr_t(output + OUTPUTS) * row_bytes + uintptr_t(chunk.first_input) * sizeof(Weight);
    Ahead ahead = {uintptr_t(job.weight) + next, row_bytes, Form::STEP * sizeof(Weight)};
    for (int64_t row = chunk.first_row; row < chunk.last_row; row += LANES, ahead = {}) {
        const float *rows = x + row * padded_inputs<Form>(job) + chunk.first_input * LANES;
        if (VECTORS > 1 && chunk.last_row - row <= WIDTH)
            outputs_of<1, LANES, OUTPUTS, Form::STEP>(rows, weights, job, chunk, ahead, row, output);
        else
            outputs_of<VECTORS, LANES, OUTPUTS, Form::STEP>(rows, weights, job, chunk, ahead, row, output);
    }
}

// Outputs [output, last) of the rows [first_row, last_row).
template <typename Form, int VECTORS>
void task(const float *x, float *weights, const Linear &job, int64_t first_row, int64_t last_row, int64_t output,
          int64_t last) {
    const int64_t inputs = padded_inputs<Form>(job);
    int64_t k = 0;
    do {
        const Chunk chunk = {first_row, last_row, k, inputs - k < CHUNK_INPUTS ? inputs - k : CHUNK_INPUTS};
        for (int64_t n = output; n < last; n += SUMS / VECTORS) tile<Form, VECTORS>(x, weights, job, chunk, n);
        k += CHUNK_INPUTS;
    } while (k < inputs);
}

template <typename Form, int VECTORS>
bool run_lanes(const Linear &job, int32_t threads) {
    static thread_local Scratch packed_rows, tile_weights;
    constexpr int64_t LANES = VECTORS * WIDTH, CHUNK_ROWS = CHUNK_BYTES / 4 / CHUNK_INPUTS / LANES * LANES;
    const int64_t inputs = padded_inputs<Form>(job), steps = inputs / Form::STEP;
    const int64_t rows = (job.rows + LANES - 1) / LANES * LANES;
    const int64_t tasks = (job.outputs + OUTPUTS_PER_TASK - 1) / OUTPUTS_PER_TASK;
    const int64_t all_tasks = tasks * ((job.rows + CHUNK_ROWS - 1) / CHUNK_ROWS);
    auto *x = static_cast<float *>(packed_rows.at_least(size_t(rows * inputs) * sizeof(float)));
    if (!x && inputs > 0) return false;
    std::atomic<bool> failed{false};
    std::atomic<int64_t> next{0}, next_step{0};
    threads::together(threads, [&] {
        for (int64_t step; (step = next_step.fetch_add(STEPS_PER_TASK)) < steps;)
            for (int64_t end = std::min(steps, step + STEPS_PER_TASK); step < end; step++)
                for (int64_t row = 0; row < rows; row += LANES)
                    pack<Form, LANES>(job, row, step * Form::STEP, x + row * inputs + step * Form::STEP * LANES);
    });
    threads::together(threads, [&] {
        auto *weights = static_cast<float *>(tile_weights.at_least(SUMS / VECTORS * CHUNK_INPUTS * sizeof(float)));
        if (!weights) failed = true;
        // Tasks are taken, not dealt: a thread that another process holds up takes fewer.
        for (int64_t at; !failed && (at = next.fetch_add(1)) < all_tasks;) {
            const int64_t row = at / tasks * CHUNK_ROWS, output = at % tasks * OUTPUTS_PER_TASK;
            task<Form, VECTORS>(x, weights, job, row, job.rows - row < CHUNK_ROWS ? job.rows : row + CHUNK_ROWS,
                                output, job.outputs - output < OUTPUTS_PER_TASK ? job.outputs
                                                                                 : output + OUTPUTS_PER_TASK);
        }
    });
    return !failed;
}

// False where there is no memory for the buffers.
template <typename Form>
bool run(const Linear &job, int32_t threads) {
    return job.rows <= WIDTH ? run_lanes<Form, 1>(job, threads) : run_lanes<Form, 2>(job, threads);
}

}  // namespace many_rows
