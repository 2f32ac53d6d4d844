// The data of the attention kernels: the job, its spans and tasks, and the running softmax of one row.

#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "scratch.h"
#include "vector.h"

// A pool [block, token, kv head, dim]; strides are in elements, the dims of a head are contiguous.
struct Pool {
    const void *data;
    int64_t block_stride, token_stride, head_stride;
};

// `tokens` rows of the query from `first_row` on, at positions `start` and up of a sequence whose block table
// begins at entry `table`.
struct Span {
    int64_t first_row, tokens, start, table;
};

// The first `decode_rows` rows are in decode: of their spans few tokens are computed as each alone. Prompts are computed
// alike however they are cut, but where one token is left.
// A row of a span attends to the keys of its sequence up to its own position, or, if `window` is not 0, to the last
// `window` of them. Rows outside every span are not written. Strides are as in `Pool`. Keys have `head_dim` dims, values
// and the output `value_dim`. Scores are limited to +-`softcap`, if that is not 0. `sinks`, if not null, has a logit per
// head whose weight is added to those of the keys.
struct Attention {
    const void *query;
    void *out;
    Pool keys, values;
    const int32_t *tables;
    const Span *spans;
    int64_t num_rows, num_blocks, num_entries, num_spans;
    int64_t heads, kv_heads, head_dim, value_dim, block_size, window, decode_rows;
    int64_t query_row_stride, query_head_stride, out_row_stride, out_head_stride;
    const float *sinks;
    float scale, softcap;
    int32_t query_type, pool_type;

    int64_t group() const { return heads / kv_heads; }
    // The factor of a score s after which 2^s is the weight of a key.
    float factor() const { return scale * LOG2_E; }
    int64_t padded_dim() const { return (head_dim + WIDTH - 1) / WIDTH * WIDTH; }
    int64_t padded_value_dim() const { return (value_dim + WIDTH - 1) / WIDTH * WIDTH; }
    // Keys that the query at `position` sees: [first_key, position].
    int64_t first_key(int64_t position) const { return window && position >= window ? position + 1 - window : 0; }
};

// A part of the work on `span`: tokens [first, last) and one kv head; or, if `kv_head` is -1, keys [first, last) and
// all heads.
struct Task {
    int64_t span, kv_head, first, last;
};

#define UNROLL_ALL _Pragma("GCC unroll 32")

template <typename X>
void widen_row(const X *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] = as_float(from[i]);
}

// How numbers of query and pool are multiplied. In cache they lie in words of 32 bits with GROUP numbers each: dims of
// a key or query, values of a dim, or weights of a row. `words` loads consecutive numbers, the first `count` and then
// zeros. `across` loads the same dims of GROUP keys. `without` zeroes keys outside [low, high), where `key` is the
// first of the word. `weigh` stores a vector of weights 2^x, x <= 0, at index i and adds them to `sum`.
template <typename T>
struct Floats {
    typedef T Number;
    static constexpr int64_t GROUP = 1;
    static constexpr bool IN_TILES = false;

    static Vector add(Vector a, Vector b, Vector sum) { return multiply_add(a, b, sum); }
    static Vector words(const T *from) { return load(from); }
    static Vector words(const T *from, int64_t count) { return load_part(from, count); }
    template <int COUNT>
    static void across(const T *key, const T *, Vector (&to)[COUNT]) {
        UNROLL_ALL for (int v = 0; v < COUNT; v++) to[v] = load(key + v * WIDTH);
    }
    static Vector across(const T *key, const T *, int64_t count) {
        return count == WIDTH ? load(key) : load_part(key, count);
    }
    static Vector without(Vector values, int64_t, int64_t, int64_t) { return values; }
    static Vector weigh(Vector x, float *to, int64_t i, Vector sum) {
        const Vector weights = power_of_two(x);
        save(to + i, weights);
        return multiply_add(weights, all(1.0f), sum);
    }
    static void load_query(const Attention &job, int64_t at, float *to) {
        switch (job.query_type) {
            case FLOAT32: return widen_row(static_cast<const float *>(job.query) + at, job.head_dim, to);
            case BFLOAT16: return widen_row(static_cast<const BFloat16 *>(job.query) + at, job.head_dim, to);
            default: return widen_row(static_cast<const Float16 *>(job.query) + at, job.head_dim, to);
        }
    }
};

#if defined(__AVX512BF16__)
// For bfloat16 query and pool: one instruction multiplies pairs and adds in float32. Weights are rounded to bfloat16,
// as in FlashAttention. Their sum adds the rounded weights, so a row's weights add up to 1.
struct Pairs {
    typedef BFloat16 Number;
    static constexpr int64_t GROUP = 2;
    static constexpr bool IN_TILES = false;

    static Vector add(Vector a, Vector b, Vector sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static Vector words(const BFloat16 *from) { return load(reinterpret_cast<const float *>(from)); }
    static Vector words(const BFloat16 *from, int64_t count) {
        return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32(1) << count) - 1, from));
    }
    static Vector pair(__m256i first, __m256i second) {
        const __m512i low = _mm512_cvtepu16_epi32(first), high = _mm512_cvtepu16_epi32(second);
        return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    // Two vectors at a time, with one permutation each.
    template <int COUNT>
    static void across(const BFloat16 *first, const BFloat16 *second, Vector (&to)[COUNT]) {
        const __m512i dims = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i low = _mm512_or_si512(dims, _mm512_slli_epi32(_mm512_add_epi32(dims, _mm512_set1_epi32(32)), 16));
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        UNROLL_ALL for (int v = 0; v + 1 < COUNT; v += 2) {
            const __m512i a = _mm512_loadu_si512(first + v * WIDTH), b = _mm512_loadu_si512(second + v * WIDTH);
            to[v] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
            to[v + 1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
        }
        constexpr int64_t last = COUNT - 1;
        if constexpr (COUNT % 2 == 1) to[last] = across(first + last * WIDTH, second + last * WIDTH, WIDTH);
    }
    static Vector across(const BFloat16 *first, const BFloat16 *second, int64_t count) {
        const __mmask16 there = __mmask16((1u << count) - 1);
        return pair(_mm256_maskz_loadu_epi16(there, first), _mm256_maskz_loadu_epi16(there, second));
    }
    static Vector without(Vector values, int64_t key, int64_t low, int64_t high) {
        const uint32_t seen = (key < low ? 0u : 0xffffu) | (key + 1 < high ? 0xffff0000u : 0u);
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(int32_t(seen))));
    }
    // 2^floor(x) times a polynomial (Remez) of the fraction. Its error is at most 7.5e-5, a 26th of the rounding.
    static Vector weigh(Vector x, float *to, int64_t i, Vector sum) {
        const Vector f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Vector weights = multiply_add(f, all(7.80245226e-2f), all(2.26067155e-1f));
        weights = multiply_add(f, multiply_add(f, weights, all(6.9583354e-1f)), all(9.99925219e-1f));
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(times_power(weights, x));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + i / GROUP), rounded);
        const __m512i ones = _mm512_set1_epi16(0x3f80);
        return add(_mm512_castsi512_ps(_mm512_zextsi256_si512(rounded)), _mm512_castsi512_ps(ones), sum);
    }
    static void load_query(const Attention &job, int64_t at, float *to) {
        std::memcpy(to, static_cast<const BFloat16 *>(job.query) + at, size_t(job.head_dim) * sizeof(BFloat16));
    }
};

// The same words, for registers in tiles.
struct TiledPairs : Pairs {
    static constexpr bool IN_TILES = true;
};
#endif

// Loads a head's query at `row` as words, with zeros up to the padded dim.
template <typename Form>
void load_query(const Attention &job, int64_t row, int64_t head, float *to) {
    std::memset(to, 0, size_t(job.padded_dim()) * sizeof *to);
    Form::load_query(job, row * job.query_row_stride + head * job.query_head_stride, to);
}

template <typename X>
void narrow_row(const float *from, int64_t count, float divisor, X *to) {
    for (int64_t i = 0; i < count; i++) round_to(from[i] / divisor, to[i]);
}

#if defined(__AVX512BF16__)
inline void narrow_row(const float *from, int64_t count, float divisor, BFloat16 *to) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + i),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(load(from + i), all(divisor))));
    for (; i < count; i++) round_to(from[i] / divisor, to[i]);
}
#endif

// Stores a row's output: the sums over its keys, divided by the sum of their weights.
inline void store_out(const Attention &job, int64_t row, int64_t head, const float *sums, float weight) {
    const int64_t at = row * job.out_row_stride + head * job.out_head_stride;
    switch (job.query_type) {
        case FLOAT32: return narrow_row(sums, job.value_dim, weight, static_cast<float *>(job.out) + at);
        case BFLOAT16: return narrow_row(sums, job.value_dim, weight, static_cast<BFloat16 *>(job.out) + at);
        default: return narrow_row(sums, job.value_dim, weight, static_cast<Float16 *>(job.out) + at);
    }
}

// Finds the addresses in a pool of keys [first, first + count) of a span, for kv head 0.
template <typename T>
void find_keys(const Attention &job, const Pool &pool, const Span &span, int64_t first, int64_t count, const T **at) {
    const int32_t *block = job.tables + span.table + first / job.block_size;
    int64_t token = first % job.block_size;
    const T *data = static_cast<const T *>(pool.data);
    for (int64_t i = 0; i < count; i++) {
        at[i] = data + *block * pool.block_stride + token * pool.token_stride;
        if (++token == job.block_size) token = 0, block++;
    }
}

// The running softmax of one row (Milakov and Gimelshein 2018): the greatest score so far, and the sum of all weights
// relative to it, lane by lane.
struct Softmax {
    float greatest;
    float weights[WIDTH];

    void begin() { greatest = -__builtin_inff(), save(weights, zero()); }
    float weight() const { return total(load(weights)); }

    // The score to which weights are relative. If all scores are -inf, all weights are 0.
    static float origin(float greatest) { return greatest == -__builtin_inff() ? 0.0f : greatest; }
    static float power(float x) {
        float lanes[WIDTH];
        save(lanes, power_of_two(all(x)));
        return lanes[0];
    }
};

// The sum of the weights of a row of `head`, relative to `greatest`: that of its keys, `weight`, and that of its sink.
inline float with_sink(const Attention &job, int64_t head, float greatest, float weight) {
    if (!job.sinks) return weight;
    const float distance = job.sinks[head] * LOG2_E - Softmax::origin(greatest);
    return weight + (distance <= 0 ? Softmax::power(distance) : 1 / Softmax::power(-distance));
}

// Limits `count` scores, whole vectors of logits times LOG2_E, to +-softcap times LOG2_E by tanh.
inline void cap_scores(const Attention &job, float *scores, int64_t count) {
    const Vector limit = all(job.softcap * LOG2_E), inverse = all(1 / job.softcap);
    for (int64_t i = 0; i < count; i += WIDTH)
        save(scores + i, multiply(limit, tanh_of_log2(multiply(load(scores + i), inverse))));
}

// The greatest of scores [first, last), a range of whole vectors.
inline float greatest_score(const float *scores, int64_t first, int64_t last) {
    Vector most = load(scores + first);
#pragma GCC unroll 4
    for (int64_t i = first + WIDTH; i < last; i += WIDTH) most = greater_of(most, load(scores + i));
    return greatest_of(most);
}

// Turns scores [first, last) into words of weights relative to `origin`. Returns `sum` plus the weights, lane by lane.
template <typename Form>
Vector weigh(float *scores, int64_t first, int64_t last, Vector origin, Vector sum) {
#pragma GCC unroll 8
    for (int64_t i = first; i < last; i += WIDTH)
        sum = Form::weigh(difference(load(scores + i), origin), scores, i, sum);
    return sum;
}

// Turns scores [low[m], high[m]) of ROWS rows, TILE apart, into weights. Other scores in the same vectors become
// weights of 0. `factors` rescale the earlier sums of each row; 1 for a row without scores.
template <typename Form, int ROWS, int64_t TILE>
void add_scores(float *scores, const int64_t *low, const int64_t *high, Softmax *rows, float *factors) {
    float changes[(ROWS + WIDTH - 1) / WIDTH * WIDTH] = {};
    for (int m = 0; m < ROWS; m++, scores += TILE) {
        if (low[m] >= high[m]) continue;
        const int64_t first = low[m] / WIDTH * WIDTH, last = (high[m] + WIDTH - 1) / WIDTH * WIDTH;
        for (int64_t i = first; i < low[m]; i++) scores[i] = -__builtin_inff();
        for (int64_t i = high[m]; i < last; i++) scores[i] = -__builtin_inff();
        // With both ends constant the compiler unrolls the loop.
        const bool whole = first == 0 && last == TILE;
        const float found = whole ? greatest_score(scores, 0, TILE) : greatest_score(scores, first, last);
        const float before = rows[m].greatest;
        rows[m].greatest = found > before ? found : before;
        changes[m] = before - Softmax::origin(rows[m].greatest);
    }
    for (int m = 0; m < ROWS; m += WIDTH) save(changes + m, power_of_two(load(changes + m)));
    scores -= ROWS * TILE;
    for (int m = 0; m < ROWS; m++, scores += TILE) {
        factors[m] = changes[m];
        if (low[m] >= high[m]) continue;
        const int64_t first = low[m] / WIDTH * WIDTH, last = (high[m] + WIDTH - 1) / WIDTH * WIDTH;
        const Vector origin = all(Softmax::origin(rows[m].greatest));
        const Vector sum = multiply(load(rows[m].weights), all(factors[m]));
        const bool whole = first == 0 && last == TILE;
        save(rows[m].weights,
             whole ? weigh<Form>(scores, 0, TILE, origin, sum) : weigh<Form>(scores, first, last, origin, sum));
    }
}
