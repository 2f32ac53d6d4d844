// y = x W^T + bias for weights in the number format of their checkpoint: float32, bfloat16 or float16. Sums are
// float32. x and y are float32 too; where the CPU multiplies bfloat16, x may be bfloat16, and y with it.
// Matrices lie in panels: PANEL outputs side by side, input by input. A pass over the inputs reads one stream of
// memory. Each output's sum is a lane of a register, so no sum crosses lanes. The weights of a block of inputs stay in
// L1 while all rows of x are multiplied by them (the blocking of Goto and van de Geijn, 2008).
// The library also replays recorded calls of C functions (`Replay`).

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "grouped.h"
#include "interface.h"
#include "numbers.h"
#include "scratch.h"
#include "tiles.h"
#include "vector.h"

// y[rows, outputs] = x[rows, inputs] W^T + bias, W in panels. Strides are in elements; columns of x and y are
// contiguous. bias has x's type or is null; y has x's type or is float32.
struct Linear {
    const void *x;
    const void *panels;
    const void *bias;
    void *y;
    int64_t rows, outputs, inputs;
    int64_t x_stride, y_stride;
    int32_t x_type, weight_type, y_type;
};

// The same for `matrices` of `linear.outputs` each, one below another in `linear.panels`: rows [starts[e], starts[e + 1])
// of x meet the e-th. bias is [matrices, outputs].
struct Grouped {
    const int64_t *starts;
    int64_t matrices;
    Linear linear;
};

// Rows [0, rows) of `weight` become the outputs [first, first + rows) of `panels`. Rows are contiguous.
struct Packing {
    const void *weight;
    void *panels;
    int64_t rows, inputs, weight_stride, first;
    int32_t weight_type;
};

// y[rows, inputs]: row i holds the weights of output `index[i]` of `table`. The table has panels of `panel` outputs and
// groups of `group` inputs; a plain table has 1 and 1. y has the table's type or is float32.
struct Gather {
    const void *table;
    const int64_t *index;
    void *y;
    int64_t rows, outputs, inputs, panel, group;
    float scale;
    int32_t type, y_type;
};

namespace packed {

// Sums fill the registers, except for the weights of a step and one number of x: 32 registers with AVX-512, else 16.
constexpr int VECTORS = WIDTH == 16 ? 4 : 2;
constexpr int64_t PANEL = VECTORS * WIDTH;
constexpr int64_t MOST_TILE_ROWS = 6;
constexpr int64_t BLOCK_BYTES = 16 << 10;
constexpr int64_t CHUNK_ROWS = 384, GATHERED_ALONE = 16;
constexpr int64_t AHEAD_BYTES = 4096, LINE = 64;

// All loops over sums are unrolled: an array that is indexed by a variable does not stay in registers.
#define UNROLL _Pragma("GCC unroll 24")

// How many inputs of an output lie side by side: two for bfloat16, as the instruction for pairs needs.
template <typename W>
constexpr int64_t GROUP = 1;
template <>
inline constexpr int64_t GROUP<BFloat16> = 2;

template <typename W>
int64_t groups(int64_t inputs) {
    return (inputs + GROUP<W> - 1) / GROUP<W>;
}

// Adds the products of one group of inputs. x is float32 already; weights are widened in `add`.
template <typename W>
struct Floats {
    typedef W Weight;
    typedef float X;
    template <int ROWS>
    static void add(const float *x, int64_t stride, const W *weights, int64_t, Vector (&sum)[ROWS][VECTORS]) {
        Vector w[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) w[v] = load(weights + v * WIDTH);
        UNROLL for (int m = 0; m < ROWS; m++) {
            const Vector number = all(x[m * stride]);
            UNROLL for (int v = 0; v < VECTORS; v++) sum[m][v] = multiply_add(number, w[v], sum[m][v]);
        }
    }
};

// The first of a pair is the even element, the second the odd one, which may be missing.
template <>
template <int ROWS>
void Floats<BFloat16>::add(const float *x, int64_t stride, const BFloat16 *weights, int64_t inputs,
                           Vector (&sum)[ROWS][VECTORS]) {
    Vector w[VECTORS], unused;
    UNROLL for (int v = 0; v < VECTORS; v++) load_even_odd(weights + 2 * v * WIDTH, w[v], unused);
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Vector number = all(x[m * stride]);
        UNROLL for (int v = 0; v < VECTORS; v++) sum[m][v] = multiply_add(number, w[v], sum[m][v]);
    }
    if (inputs < 2) return;
    UNROLL for (int v = 0; v < VECTORS; v++) load_even_odd(weights + 2 * v * WIDTH, unused, w[v]);
    UNROLL for (int m = 0; m < ROWS; m++) {
        const Vector number = all(x[m * stride + 1]);
        UNROLL for (int v = 0; v < VECTORS; v++) sum[m][v] = multiply_add(number, w[v], sum[m][v]);
    }
}

#if defined(__AVX512BF16__)
// One instruction adds pairs of bfloat16 products in float32.
struct Pairs {
    typedef BFloat16 Weight;
    typedef BFloat16 X;
    template <int ROWS>
    static void add(const BFloat16 *x, int64_t stride, const BFloat16 *weights, int64_t inputs,
                    Vector (&sum)[ROWS][VECTORS]) {
        __m512bh w[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) w[v] = (__m512bh)_mm512_loadu_si512(weights + 2 * v * WIDTH);
        UNROLL for (int m = 0; m < ROWS; m++) {
            int32_t both = x[m * stride].bits;
            if (inputs > 1) std::memcpy(&both, x + m * stride, sizeof both);
            const __m512bh numbers = (__m512bh)_mm512_set1_epi32(both);
            UNROLL for (int v = 0; v < VECTORS; v++) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], numbers, w[v]);
        }
    }
};

inline void round_to(Vector v, BFloat16 *to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(v));
}
#endif

inline void round_to(Vector v, float *to) { save(to, v); }

// Prefetches weights during computation: in each step some lines from `at` on, to L1 if `near`, else to L2. Prefetches
// are hints and may point past the end.
struct Ahead {
    uintptr_t at;
    int64_t lines;
    bool near;
    void step() {
        for (int64_t i = 0; i < lines; i++, at += LINE) {
            const void *line = reinterpret_cast<const void *>(at);
            near ? __builtin_prefetch(line, 0, 3) : __builtin_prefetch(line, 0, 2);
        }
    }
};

// Adds ROWS rows of x times `inputs` inputs of a panel to `sums` [ROWS, PANEL]; if `first`, stores them.
template <typename Form, int ROWS>
void tile(const typename Form::X *x, int64_t stride, const typename Form::Weight *weights, int64_t inputs, bool first,
          Ahead ahead, float *sums) {
    typedef typename Form::Weight W;
    constexpr int64_t STEP = GROUP<W> * PANEL;
    Vector sum[ROWS][VECTORS];
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int v = 0; v < VECTORS; v++)
        sum[m][v] = first ? zero() : load(sums + m * PANEL + v * WIDTH);
    int64_t k = 0;
    for (; k + GROUP<W> <= inputs; k += GROUP<W>, weights += STEP) {
        ahead.step();
        Form::template add<ROWS>(x + k, stride, weights, GROUP<W>, sum);
    }
    if (k < inputs) Form::template add<ROWS>(x + k, stride, weights, inputs - k, sum);
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int v = 0; v < VECTORS; v++)
        save(sums + m * PANEL + v * WIDTH, sum[m][v]);
}

template <typename Form>
void rows_of(int64_t rows, const typename Form::X *x, int64_t stride, const typename Form::Weight *weights,
             int64_t inputs, bool first, Ahead ahead, float *sums) {
    switch (rows) {
        case 1: return tile<Form, 1>(x, stride, weights, inputs, first, ahead, sums);
        case 2: return tile<Form, 2>(x, stride, weights, inputs, first, ahead, sums);
        case 3: return tile<Form, 3>(x, stride, weights, inputs, first, ahead, sums);
        case 4: return tile<Form, 4>(x, stride, weights, inputs, first, ahead, sums);
        case 5: return tile<Form, 5>(x, stride, weights, inputs, first, ahead, sums);
        default: return tile<Form, 6>(x, stride, weights, inputs, first, ahead, sums);
    }
}

// Stores the sums of a panel, as far as they are y's outputs, which are those from `base` on.
template <typename X, typename Y>
void store(const Linear &job, const float *sums, int64_t first_row, int64_t rows, int64_t panel, int64_t base) {
    const int64_t output = std::max(base, panel * PANEL);
    const int64_t count = std::min((panel + 1) * PANEL, base + job.outputs) - output;
    const X *bias = job.bias ? static_cast<const X *>(job.bias) + output : nullptr;
    sums += output - panel * PANEL;
    for (int64_t row = 0; row < rows; row++, sums += PANEL) {
        Y *y = static_cast<Y *>(job.y) + (first_row + row) * job.y_stride + output - base;
        int64_t n = 0;
        for (; !bias && n + WIDTH <= count; n += WIDTH) round_to(load(sums + n), y + n);
        for (; n < count; n++) ::round_to(sums[n] + (bias ? as_float(bias[n]) : 0.0f), y[n]);
    }
}

// Computes rows [first, first + rows) of one panel. Each row adds in the order of its inputs, whatever the other rows.
template <typename Form, typename Y>
void task(const Linear &job, int64_t first, int64_t rows, int64_t panel, float *sums, int64_t base = 0) {
    typedef typename Form::Weight W;
    const auto *x = static_cast<const typename Form::X *>(job.x) + first * job.x_stride;
    const W *weights = static_cast<const W *>(job.panels) + panel * PANEL * GROUP<W> * groups<W>(job.inputs);
#if defined(__AMX_BF16__)
    static_assert(PANEL == tiles::PANEL);
    if constexpr (std::is_same_v<Form, Pairs>)
        if (tiles::are_granted()) {
            tiles::multiply(x, job.x_stride, rows, weights, job.inputs, sums);
            return store<typename Form::X, Y>(job, sums, first, rows, panel, base);
        }
#endif
    const int64_t tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS, size = (rows + tiles - 1) / tiles;
    const int64_t block = tiles < 2 ? job.inputs : BLOCK_BYTES / PANEL / int64_t(sizeof(W));
    const int64_t lines = (GROUP<W> * PANEL * int64_t(sizeof(W)) / LINE + tiles - 1) / tiles;
    int64_t k = 0;
    do {
        // A single tile prefetches its own stream to L1. Several tiles prefetch the next block together, to L2: it and
        // the current block would not fit into an L1 of 32 KB.
        uintptr_t next = uintptr_t(weights + k * PANEL) + (tiles < 2 ? AHEAD_BYTES : BLOCK_BYTES);
        for (int64_t row = 0; row < rows; row += size, next += uintptr_t(BLOCK_BYTES / tiles))
            rows_of<Form>(std::min(size, rows - row), x + row * job.x_stride + k, job.x_stride, weights + k * PANEL,
                          std::min(block, job.inputs - k), !k, {next, lines, tiles < 2}, sums + row * PANEL);
        k += block;
    } while (k < job.inputs);
    store<typename Form::X, Y>(job, sums, first, rows, panel, base);
}

// Returns false if there is no memory for the sums.
template <typename Form, typename Y = float>
bool run(const Linear &job, int32_t threads) {
    static thread_local Scratch scratch;
    const int64_t panels = (job.outputs + PANEL - 1) / PANEL, chunks = (job.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    std::atomic<bool> failed{false};
    std::atomic<int64_t> next{0};
    // Threads take tasks one by one, so a thread that another process delays takes fewer.
    threads::together(threads, [&] {
        auto *sums = static_cast<float *>(scratch.at_least(sizeof(float) * CHUNK_ROWS * PANEL));
        if (!sums) failed = true;
        for (int64_t at; !failed && (at = next.fetch_add(1)) < panels * chunks;) {
            const int64_t row = at / panels * CHUNK_ROWS;
            task<Form, Y>(job, row, std::min(CHUNK_ROWS, job.rows - row), at % panels, sums);
        }
    });
    return !failed;
}

// As `run`; matrices without rows are not read.
template <typename Form, typename Y = float>
bool run(const Grouped &job, int32_t threads) {
    static thread_local Scratch scratch;
    std::atomic<bool> failed{false};
    std::atomic<int64_t> next{0};
    threads::together(threads, [&] {
        auto *sums = static_cast<float *>(scratch.at_least(sizeof(float) * CHUNK_ROWS * PANEL));
        if (!sums) failed = true;
        GroupedTasks at(job.starts, job.matrices, job.linear.outputs, PANEL, CHUNK_ROWS);
        while (!failed && at.move_to(next.fetch_add(1)))
            task<Form, Y>(job.linear, at.first, at.rows, at.panel, sums, at.begin());
    });
    return !failed;
}

// Padding at the panels' ends is not written: it is zero already.
template <typename W>
void pack(const Packing &job, int32_t threads) {
    const int64_t panels = (job.first + job.rows + PANEL - 1) / PANEL;
    std::atomic<int64_t> next{job.first / PANEL};
    threads::together(threads, [&] {
        for (int64_t panel; (panel = next.fetch_add(1)) < panels;) {
            const int64_t begin = std::max(job.first, panel * PANEL);
            const int64_t end = std::min(job.first + job.rows, (panel + 1) * PANEL);
            const W *from = static_cast<const W *>(job.weight) + (begin - job.first) * job.weight_stride;
            W *to = static_cast<W *>(job.panels) + panel * PANEL * GROUP<W> * groups<W>(job.inputs);
            for (int64_t k = 0; k < job.inputs; k += GROUP<W>)
                for (int64_t n = begin; n < end; n++)
                    for (int64_t i = 0; i < GROUP<W> && k + i < job.inputs; i++)
                        to[k * PANEL + n % PANEL * GROUP<W> + i] = from[(n - begin) * job.weight_stride + k + i];
        }
    });
}

// Values times `scale`. Y is W or float.
template <typename W, typename Y>
void copy(const W *from, int64_t count, float scale, Y *to) {
    if (scale != 1.0f)
        for (int64_t i = 0; i < count; i++) ::round_to(as_float(from[i]) * scale, to[i]);
    else if constexpr (std::is_same_v<W, Y>)
        std::memcpy(to, from, size_t(count) * sizeof *to);
    else
        for (int64_t i = 0; i < count; i++) to[i] = as_float(from[i]);
}

template <typename W, typename Y>
void gather(const Gather &job, int32_t threads) {
    const int64_t groups = (job.inputs + job.group - 1) / job.group, step = job.panel * job.group;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t row; (row = next.fetch_add(1)) < job.rows;) {
            const int64_t panel = job.index[row] / job.panel, place = job.index[row] % job.panel;
            const W *from = static_cast<const W *>(job.table) + panel * groups * step + place * job.group;
            Y *to = static_cast<Y *>(job.y) + row * job.inputs;
            if (job.panel == 1) {
                copy(from, job.inputs, job.scale, to);
                continue;
            }
            for (int64_t k = 0; k < job.inputs; k += job.group, from += step)
                copy(from, std::min(job.group, job.inputs - k), job.scale, to + k);
        }
    };
    threads::together(job.rows < GATHERED_ALONE ? 1 : threads, work);
}

}  // namespace packed

struct Call {
    int32_t (*function)(const void *job, int32_t threads);
    const void *job;
};

// If a call fails, `failed` is its index.
struct Replay {
    const Call *calls;
    int64_t count, failed;
};

inline int32_t replay(Replay &job, int32_t threads) {
    for (int64_t i = 0; i < job.count; i++)
        if (const int32_t outcome = job.calls[i].function(job.calls[i].job, threads)) {
            job.failed = i;
            return outcome;
        }
    return 0;
}

// `types` of `job`, which is a `Linear` or `Grouped`.
template <typename Job>
int32_t multiply(const Job &job, const Linear &types, int32_t threads) {
#if defined(__AVX512BF16__)
    if (types.x_type == BFLOAT16 && types.weight_type == BFLOAT16) switch (types.y_type) {
            case FLOAT32: return packed::run<packed::Pairs, float>(job, threads) ? DONE : NO_MEMORY;
            case BFLOAT16: return packed::run<packed::Pairs, BFloat16>(job, threads) ? DONE : NO_MEMORY;
            default: return NO_KERNEL;
        }
#endif
    if (types.x_type != FLOAT32 || types.y_type != FLOAT32) return NO_KERNEL;
    switch (types.weight_type) {
        case FLOAT32: return packed::run<packed::Floats<float>>(job, threads) ? DONE : NO_MEMORY;
        case BFLOAT16: return packed::run<packed::Floats<BFloat16>>(job, threads) ? DONE : NO_MEMORY;
        case FLOAT16: return packed::run<packed::Floats<Float16>>(job, threads) ? DONE : NO_MEMORY;
        default: return NO_KERNEL;
    }
}

extern "C" {

// The outputs of a panel; callers round up to it when they allocate panels.
EXPORTED int64_t sagellm_panel() { return packed::PANEL; }

EXPORTED int32_t sagellm_pack(const Packing *job, int32_t threads) {
    if (job->rows <= 0) return DONE;
    switch (job->weight_type) {
        case FLOAT32: packed::pack<float>(*job, threads); return DONE;
        case BFLOAT16: packed::pack<BFloat16>(*job, threads); return DONE;
        case FLOAT16: packed::pack<Float16>(*job, threads); return DONE;
        default: return NO_KERNEL;
    }
}

EXPORTED int32_t sagellm_linear(const Linear *job, int32_t threads) {
    return job->rows <= 0 || job->outputs <= 0 ? DONE : multiply(*job, *job, threads);
}

EXPORTED int32_t sagellm_grouped_linear(const Grouped *job, int32_t threads) {
    const Linear &linear = job->linear;
    if (linear.rows <= 0 || linear.outputs <= 0) return DONE;
    return are_starts(job->starts, job->matrices, linear.rows) ? multiply(*job, linear, threads) : BAD_INDEX;
}

// All indices are checked before anything is written.
EXPORTED int32_t sagellm_gather(const Gather *job, int32_t threads) {
    for (int64_t row = 0; row < job->rows; row++)
        if (job->index[row] < 0 || job->index[row] >= job->outputs) return BAD_INDEX;
    if (job->y_type != job->type && job->y_type != FLOAT32) return NO_KERNEL;
    const bool is_same = job->type == job->y_type;
    switch (job->type) {
        case FLOAT32: packed::gather<float, float>(*job, threads); return DONE;
        case BFLOAT16:
            is_same ? packed::gather<BFloat16, BFloat16>(*job, threads) : packed::gather<BFloat16, float>(*job, threads);
            return DONE;
        case FLOAT16:
            is_same ? packed::gather<Float16, Float16>(*job, threads) : packed::gather<Float16, float>(*job, threads);
            return DONE;
        default: return NO_KERNEL;
    }
}

EXPORTED int32_t sagellm_replay(Replay *job, int32_t threads) { return replay(*job, threads); }

}  // extern "C"
