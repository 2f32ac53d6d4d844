// The operations between a decoder's matrices, row by row, for float32, bfloat16 or float16: residual add and RMSNorm,
// rotary embedding and KV write, gated activation. Sums and products are float32 and rounded once. A row's result
// depends on that row alone. The calling thread computes few rows alone: waking helpers would take longer.

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "elements.h"

// y = RMSNorm(x) weight, of rows x columns; without a weight there is no y. If there is a delta, x first becomes
// x + delta, or with a delta weight x + RMSNorm(delta) delta_weight. Strides are those of rows, in elements; elements
// of a row are contiguous; all have one type.
struct AddNorm {
    void *x;
    const void *delta;
    const void *delta_weight;
    const void *weight;
    void *y;
    int64_t rows, columns, x_stride, delta_stride, y_stride;
    float eps;
    int32_t type;
};

// A pool [block, token, kv head, dim]; the dims of a head are contiguous.
struct Slots {
    void *data;
    int64_t block_stride, token_stride, head_stride;
};

// A row holds query, key and value heads, one after the other. Queries and keys get their RMSNorm (null weights: none)
// and are rotated in place by cos and sin [rows, dim / 2] (null: no rotation). Keys and values are copied to `slots`,
// each block x block size + token. If `whole`, a norm is over all query heads and one over all key heads. If
// `norm_values`, values get an RMSNorm without weights. Without KV heads there are neither slots nor pools.
struct Rotate {
    void *heads;
    const void *cos;
    const void *sin;
    const void *query_weight;
    const void *key_weight;
    const int64_t *slots;
    Slots keys, values;
    int64_t rows, query_heads, kv_heads, dim, row_stride, angle_stride, num_blocks, block_size;
    float eps, value_eps;
    int32_t type, pool_type, whole, norm_values;
};

// Each row's token is the one with the greatest of its logits; the rows go on to it, one position further. Position,
// start of the span [rows, 4] and slot move on; the tables have the blocks. `hidden` becomes what the next step is given.
// The state [2] is how many steps were drawn, and how many will be: after the last one the rows stay. Tokens and their
// probabilities go to [steps, rows]; a probability is NaN where a logit is.
struct DrawNext {
    const float *logits;
    const void *hidden;
    void *given;
    int64_t *tokens, *positions, *spans, *slots;
    const int32_t *tables;
    int64_t *drawn;
    float *chances;
    int64_t *state;
    int64_t rows, vocab, logit_stride, hidden_bytes, block_size, entries, most;
};

enum Activation : int32_t { SILU, GELU, CLAMPED };

// y = silu(gate) up, or gelu(gate) up, each of rows x columns. A row of the input is its gate, then its up. CLAMPED
// (gpt-oss): gate sigmoid(alpha gate) (up + 1), after the gate is limited to `limit` and up to +-`limit`.
struct Gated {
    const void *gate;
    void *y;
    int64_t rows, columns, gate_stride, y_stride;
    float limit, alpha;
    int32_t type, activation;
};

template <typename T>
void norm(const T *x, const T *weight, float scale, int64_t count, T *y) {
    by_vectors(0, count, [&](int64_t i, int64_t left) {
        put(y + i, multiply(multiply(take(x + i, left), all(scale)), take(weight + i, left)), left);
    });
}

template <typename T>
void norm(const T *x, float scale, int64_t count, T *y) {
    by_vectors(0, count, [&](int64_t i, int64_t left) { put(y + i, multiply(take(x + i, left), all(scale)), left); });
}

template <typename T>
void add_norm(const AddNorm &job, int64_t row) {
    T *x = static_cast<T *>(job.x) + row * job.x_stride;
    const T *delta = job.delta ? static_cast<const T *>(job.delta) + row * job.delta_stride : nullptr;
    Squares squares;
    if (delta && job.delta_weight) {
        const T *weight = static_cast<const T *>(job.delta_weight);
        Squares own;
        by_vectors(0, job.columns, [&](int64_t i, int64_t left) { own.add(take(delta + i, left)); });
        const Vector scale = all(own.scale(job.columns, job.eps));
        by_vectors(0, job.columns, [&](int64_t i, int64_t left) {
            const Vector normed = multiply(multiply(take(delta + i, left), scale), take(weight + i, left));
            put(x + i, take(x + i, left) + normed, left);
            squares.add(take(x + i, left));
        });
    } else if (delta)
        by_vectors(0, job.columns, [&](int64_t i, int64_t left) {
            put(x + i, take(x + i, left) + take(delta + i, left), left);
            squares.add(take(x + i, left));
        });
    else
        by_vectors(0, job.columns, [&](int64_t i, int64_t left) { squares.add(take(x + i, left)); });
    if (!job.weight) return;
    T *y = static_cast<T *>(job.y) + row * job.y_stride;
    norm(x, static_cast<const T *>(job.weight), squares.scale(job.columns, job.eps), job.columns, y);
}

// RMSNorm of one head in place, or of several; without weights if that is null.
template <typename T>
void norm_head(T *head, const T *weight, int64_t dim, float eps) {
    Squares squares;
    by_vectors(0, dim, [&](int64_t i, int64_t left) { squares.add(take(head + i, left)); });
    const float scale = squares.scale(dim, eps);
    if (weight)
        norm(head, weight, scale, dim, head);
    else
        norm(head, scale, dim, head);
}

// Element i of a head's first half and element i of its second half rotate as a pair (Su et al. 2021).
template <typename T>
void rotate_head(T *head, const T *cos, const T *sin, int64_t half) {
    by_vectors(0, half, [&](int64_t i, int64_t left) {
        const Vector c = take(cos + i, left), s = take(sin + i, left);
        const Vector a = take(head + i, left), b = take(head + half + i, left);
        put(head + i, difference(multiply(a, c), multiply(b, s)), left);
        put(head + half + i, multiply_add(a, s, multiply(b, c)), left);
    });
}

template <typename T>
void copy_head(const T *from, T *to, int64_t dim) {
    std::memcpy(to, from, size_t(dim) * sizeof *to);
}
template <typename T, typename P>
void copy_head(const T *from, P *to, int64_t dim) {
    by_vectors(0, dim, [&](int64_t i, int64_t left) { put(to + i, take(from + i, left), left); });
}

template <typename P>
P *place(const Slots &pool, int64_t block, int64_t token, int64_t head) {
    return static_cast<P *>(pool.data) + block * pool.block_stride + token * pool.token_stride +
           head * pool.head_stride;
}

template <typename T, typename P>
void rotate(const Rotate &job, int64_t row) {
    T *head = static_cast<T *>(job.heads) + row * job.row_stride;
    const T *cos = static_cast<const T *>(job.cos), *sin = static_cast<const T *>(job.sin);
    const int64_t angles = row * job.angle_stride, turned = job.query_heads + job.kv_heads;
    const int64_t slot = job.kv_heads ? job.slots[row] : 0;
    const int64_t block = slot / job.block_size, token = slot % job.block_size;
    if (job.whole) {
        const int64_t queries = job.query_heads * job.dim;
        norm_head(head, static_cast<const T *>(job.query_weight), queries, job.eps);
        norm_head(head + queries, static_cast<const T *>(job.key_weight), job.kv_heads * job.dim, job.eps);
    }
    for (int64_t h = 0; h < turned; h++, head += job.dim) {
        const void *weight = h < job.query_heads ? job.query_weight : job.key_weight;
        if (weight && !job.whole) norm_head(head, static_cast<const T *>(weight), job.dim, job.eps);
        if (cos) rotate_head(head, cos + angles, sin + angles, job.dim / 2);
        const int64_t kv_head = h - job.query_heads;
        if (kv_head >= 0) copy_head(head, place<P>(job.keys, block, token, kv_head), job.dim);
    }
    for (int64_t h = 0; h < job.kv_heads; h++, head += job.dim) {
        if (job.norm_values) norm_head<T>(head, nullptr, job.dim, job.value_eps);
        copy_head(head, place<P>(job.values, block, token, h), job.dim);
    }
}

// The smaller of x and limit; NaN for NaN.
inline Vector at_most(Vector x, Vector limit) {
    return difference(zero(), greater_of(difference(zero(), limit), difference(zero(), x)));
}

// gate / (1 + exp(-z)) times up, for columns [first, last) of a row. z is the gate, or alpha times it; for gelu, by its
// approximation with tanh (Hendrycks and Gimpel 2016), it is 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
template <typename T, Activation KIND>
void gated(const Gated &job, int64_t row, int64_t first, int64_t last) {
    const T *gate = static_cast<const T *>(job.gate) + row * job.gate_stride, *up = gate + job.columns;
    T *y = static_cast<T *>(job.y) + row * job.y_stride;
    by_vectors(first, last, [&](int64_t i, int64_t left) {
        Vector g = take(gate + i, left), factor = take(up + i, left), z = g;
        if constexpr (KIND == GELU)
            z = multiply(multiply(g, all(1.5957691f)), multiply_add(multiply(g, g), all(0.044715f), all(1.0f)));
        if constexpr (KIND == CLAMPED) {
            const Vector limit = all(job.limit);
            g = at_most(g, limit), z = multiply(g, all(job.alpha));
            factor = at_most(greater_of(difference(zero(), limit), factor), limit) + all(1.0f);
        }
        put(y + i, multiply(g / (all(1.0f) + exponential(difference(zero(), z))), factor), left);
    });
}

namespace {

constexpr int64_t TASK_ELEMENTS = 1 << 14;  // elements per task: some microseconds of one thread
constexpr int64_t GATED_COLUMNS = 1 << 12;  // whole vectors, so that cutting a row does not change its results

// Calls `work(first, last)` for ranges that cover `count` items of `item_elements` elements each.
template <typename Work>
void in_tasks(int64_t count, int64_t item_elements, int32_t threads, const Work &work) {
    const int64_t step = item_elements < TASK_ELEMENTS ? TASK_ELEMENTS / (item_elements + 1) + 1 : 1;
    const int64_t tasks = (count + step - 1) / step;
    if (tasks < 3 || threads < 2) return work(0, count);
    std::atomic<int64_t> next{0};
    // Threads take tasks one by one, so a thread that another process delays takes fewer.
    threads::together(tasks < threads ? int32_t(tasks) : threads, [&] {
        for (int64_t first; (first = next.fetch_add(step)) < count;)
            work(first, count - first < step ? count : first + step);
    });
}

// The place of the greatest of `count` numbers, and its share of the sum of their powers of e.
void greatest(const float *logits, int64_t count, int64_t &place, float &chance) {
    place = 0;
    for (int64_t i = 1; i < count; i++)
        if (logits[i] > logits[place]) place = i;
    const Vector best = all(logits[place]), factor = all(LOG2_E);
    Vector sums = zero();
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        sums = multiply_add(power_of_two(multiply(difference(load(logits + i), best), factor)), all(1.0f), sums);
    float sum = total(sums);
    for (; i < count; i++) sum += std::exp(logits[i] - logits[place]);
    chance = 1.0f / sum;
}

}  // namespace

extern "C" {

// All slots are found before anything is changed.
EXPORTED int32_t sagellm_draw_next(const DrawNext *job, int32_t) {
    const int64_t step = job->state[0], rows = job->rows;
    if (step < 0 || step >= job->most) return BAD_INDEX;
    const bool goes_on = step + 1 < job->state[1];
    for (int64_t row = 0; row < rows && goes_on; row++) {
        const int64_t entry = job->spans[4 * row + 3] + (job->positions[row] + 1) / job->block_size;
        if (entry < 0 || entry >= job->entries) return BAD_SPAN;
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t token;
        greatest(job->logits + row * job->logit_stride, job->vocab, token, job->chances[step * rows + row]);
        job->drawn[step * rows + row] = token;
        if (!goes_on) continue;
        const int64_t position = ++job->positions[row], entry = job->spans[4 * row + 3] + position / job->block_size;
        job->tokens[row] = token;
        job->spans[4 * row + 2] = position;
        job->slots[row] = job->tables[entry] * job->block_size + position % job->block_size;
    }
    if (goes_on) std::memcpy(job->given, job->hidden, size_t(rows * job->hidden_bytes));
    job->state[0]++;
    return DONE;
}

EXPORTED int32_t sagellm_add_norm(const AddNorm *job, int32_t threads) {
    return by_type(job->type, [&](auto number) {
        in_tasks(job->rows, job->columns, threads, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) add_norm<decltype(number)>(*job, row);
        });
        return DONE;
    });
}

// All slots are checked before anything is changed.
EXPORTED int32_t sagellm_rotate(const Rotate *job, int32_t threads) {
    for (int64_t row = 0; row < job->rows && job->kv_heads; row++)
        if (job->slots[row] < 0 || job->slots[row] / job->block_size >= job->num_blocks) return BAD_SLOT;
    const int64_t elements = (job->query_heads + 2 * job->kv_heads) * job->dim;
    return by_type(job->type, [&](auto number) {
        return by_type(job->pool_type, [&](auto held) {
            in_tasks(job->rows, elements, threads, [&](int64_t first, int64_t last) {
                for (int64_t row = first; row < last; row++) rotate<decltype(number), decltype(held)>(*job, row);
            });
            return DONE;
        });
    });
}

EXPORTED int32_t sagellm_gated(const Gated *job, int32_t threads) {
    const int64_t pieces = (job->columns + GATED_COLUMNS - 1) / GATED_COLUMNS;
    const int64_t elements = job->columns < GATED_COLUMNS ? job->columns : GATED_COLUMNS;
    return by_type(job->type, [&](auto number) {
        in_tasks(job->rows * pieces, elements, threads, [&](int64_t begin, int64_t end) {
            for (int64_t at = begin; at < end; at++) {
                const int64_t first = at % pieces * GATED_COLUMNS, last = first + GATED_COLUMNS;
                const int64_t stop = last < job->columns ? last : job->columns;
                switch (job->activation) {
                    case GELU: gated<decltype(number), GELU>(*job, at / pieces, first, stop); break;
                    case CLAMPED: gated<decltype(number), CLAMPED>(*job, at / pieces, first, stop); break;
                    default: gated<decltype(number), SILU>(*job, at / pieces, first, stop);
                }
            }
        });
        return DONE;
    });
}

}  // extern "C"
