// A few query tokens with all their heads over a range of keys (flash decoding: Dao, Haziza, Massa and Sizov 2023).
// Reading K and V is the cost, so each is read from memory once, for all tokens and all query heads of its kv head.
// Without a window a token's sums are those that it has alone, bit by bit.

#pragma once
#include "attention.h"

namespace few_tokens {

constexpr int64_t TILE = 64;    // keys whose scores are made before their values are read
constexpr int MOST_ROWS = WIDTH == 16 ? 4 : 2;
constexpr int VECTORS = 4;
constexpr int64_t MOST_HEAD_ROWS = 48;
static_assert(TILE % WIDTH == 0 && TILE % 4 == 0, "scores are whole vectors, made four at a time");

// Keys of one task. In latent attention, where values are a part of the keys, a key is one vector for many heads: much
// to compute, and large sums to combine.
inline int64_t split(const Attention &job) { return job.values.data == job.keys.data ? 512 : 128; }

// Whether a span is computed here: of more rows for each kv head it pays to lay keys out in cache (query_tiles.h).
inline bool takes(const Attention &job, const Span &span) {
    const bool is_decode = span.first_row + span.tokens <= job.decode_rows;
    return span.tokens < 2 || (is_decode && span.tokens * job.group() <= MOST_HEAD_ROWS);
}

// Query rows of one kv head, all heads of a token side by side, padded to a size that the kernels have.
inline int64_t padded_rows(const Attention &job, const Span &span) {
    const int64_t rows = span.tokens * job.group();
    return rows == 1 ? 1 : (rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
}

// Sums over a range of keys: weights times values, and the softmax of each row.
struct Sums {
    int64_t rows;
    float *values;
    Softmax *softmax;
    static size_t bytes(const Attention &job, const Span &span) {
        const size_t row = size_t(job.padded_value_dim()) * sizeof(float) + sizeof(Softmax);
        return size_t(job.kv_heads * padded_rows(job, span)) * row;
    }
    Sums(const Attention &job, const Span &span, void *at) : rows(job.kv_heads * padded_rows(job, span)) {
        values = static_cast<float *>(at);
        softmax = reinterpret_cast<Softmax *>(values + rows * job.padded_value_dim());
    }
    void begin(const Attention &job) const {
        std::memset(values, 0, size_t(rows * job.padded_value_dim()) * sizeof *values);
        for (int64_t row = 0; row < rows; row++) softmax[row].begin();
    }
};

// One head's rows of a tile of keys or values.
template <typename T>
struct Rows {
    const T *const *at;
    int64_t offset;
    const T *operator[](int64_t i) const { return at[i] + offset; }
};

// Scores of ROWS query rows and `count` keys, four keys at a time.
template <typename Form, int ROWS, typename T>
void score(const Attention &job, const float *query, Rows<T> keys, int64_t count, float *scores) {
    constexpr int64_t GROUP = Form::GROUP, STEP = WIDTH * GROUP;
    const int64_t dim = job.head_dim, row_size = job.padded_dim(), whole = dim / STEP * STEP;
    for (int64_t j = 0; j < count; j += 4) {
        const T *from[4];
        Vector sums[ROWS][4];
        UNROLL_ALL for (int i = 0; i < 4; i++) from[i] = keys[j + i < count ? j + i : count - 1];
        UNROLL_ALL for (int m = 0; m < ROWS; m++) UNROLL_ALL for (int i = 0; i < 4; i++) sums[m][i] = zero();
        for (int64_t d = 0; d < whole; d += STEP) {
            Vector key[4];
            UNROLL_ALL for (int i = 0; i < 4; i++) key[i] = Form::words(from[i] + d);
            UNROLL_ALL for (int m = 0; m < ROWS; m++) {
                const Vector row = load(query + m * row_size + d / GROUP);
                UNROLL_ALL for (int i = 0; i < 4; i++) sums[m][i] = Form::add(row, key[i], sums[m][i]);
            }
        }
        if (whole < dim) {
            UNROLL_ALL for (int i = 0; i < 4; i++) {
                const Vector key = Form::words(from[i] + whole, dim - whole);
                UNROLL_ALL for (int m = 0; m < ROWS; m++)
                    sums[m][i] = Form::add(load(query + m * row_size + whole / GROUP), key, sums[m][i]);
            }
        }
        UNROLL_ALL for (int m = 0; m < ROWS; m++) totals(sums[m], scores + m * TILE + j);
    }
    UNROLL_ALL for (int m = 0; m < ROWS; m++) for (int64_t j = 0; j < TILE; j += WIDTH)
        save(scores + m * TILE + j, multiply(load(scores + m * TILE + j), all(job.factor())));
}

// The weights of one head's values [low, high) for ROWS rows, and the factors of the earlier sums.
struct Weights {
    const float *of, *factors;
    int64_t low, high;
};

// Adds weighted values to COUNT vectors of the sums of ROWS rows; the last vector has `dims` dims.
template <typename Form, int ROWS, int COUNT, typename T>
void add_vectors(Rows<T> values, Weights weights, int64_t dims, int64_t row_size, float *sums) {
    Vector sum[ROWS][COUNT];
    UNROLL_ALL for (int m = 0; m < ROWS; m++) UNROLL_ALL for (int v = 0; v < COUNT; v++)
        sum[m][v] = multiply(load(sums + m * row_size + v * WIDTH), all(weights.factors[m]));
    // Of a group that is not whole the keys outside have weight 0, and values that another key of it lends.
    for (int64_t j = weights.low / Form::GROUP * Form::GROUP; j < weights.high; j += Form::GROUP) {
        const int64_t end = j + Form::GROUP - 1;
        const T *first = values[j < weights.low ? end : j], *last = values[end < weights.high ? end : j];
        Vector value[COUNT];
        if (COUNT > 1 || dims == WIDTH)
            Form::across(first, last, value);
        else
            value[0] = Form::across(first, last, dims);
        UNROLL_ALL for (int m = 0; m < ROWS; m++) {
            const Vector weight = all(weights.of[m * TILE + j / Form::GROUP]);
            UNROLL_ALL for (int v = 0; v < COUNT; v++) sum[m][v] = Form::add(weight, value[v], sum[m][v]);
        }
    }
    UNROLL_ALL for (int m = 0; m < ROWS; m++) UNROLL_ALL for (int v = 0; v < COUNT; v++)
        save(sums + m * row_size + v * WIDTH, sum[m][v]);
}

template <typename Form, int ROWS, typename T>
void add_values(const Attention &job, Rows<T> values, Weights weights, float *sums) {
    const int64_t dim = job.value_dim, size = job.padded_value_dim();
    int64_t d = 0;
    for (; d + VECTORS * WIDTH <= dim; d += VECTORS * WIDTH)
        add_vectors<Form, ROWS, VECTORS, T>({values.at, values.offset + d}, weights, WIDTH, size, sums + d);
    for (; d < dim; d += WIDTH)
        add_vectors<Form, ROWS, 1, T>({values.at, values.offset + d}, weights, dim - d < WIDTH ? dim - d : WIDTH,
                                      size, sums + d);
}

// Which keys of the tile at `first` the ROWS rows from `row` of a kv head see: [low, high) each, and all of them
// [low, high) of `all`, whole groups.
template <typename Form, int ROWS>
struct Seen {
    int64_t low[ROWS], high[ROWS], all_low, all_high;
    Seen(const Attention &job, const Span &span, int64_t row, int64_t first, int64_t count) : all_low(0), all_high(count) {
        for (int m = 0; m < ROWS; m++) {
            const int64_t token = (row + m) / job.group(), last = span.tokens - 1;
            const int64_t position = span.start + (token < last ? token : last);
            const int64_t from = job.first_key(position) - first, to = position + 1 - first;
            low[m] = from < 0 ? 0 : from, high[m] = to < count ? to : count;
            all_low = low[m] > all_low ? low[m] : all_low;
            all_high = high[m] < all_high ? high[m] : all_high;
        }
        if (all_high < count) all_high = all_high / Form::GROUP * Form::GROUP;
        all_low = (all_low + Form::GROUP - 1) / Form::GROUP * Form::GROUP;
        if (all_high < all_low) all_high = all_low;
    }
};

// Adds the values of a tile to the sums of ROWS rows. A row must not touch keys that it does not see, whose values may
// be inf or NaN: what all rows see is added for all at once, the rest row by row.
template <typename Form, int ROWS, typename T>
void add_seen(const Attention &job, Rows<T> values, const Seen<Form, ROWS> &seen, const float *weights,
              const float *factors, float *sums) {
    static const float ones[1] = {1.0f};
    const int64_t size = job.padded_value_dim();
    add_values<Form, ROWS>(job, values, {weights, factors, seen.all_low, seen.all_high}, sums);
    for (int m = 0; m < ROWS; m++) {
        const float *mine = weights + m * TILE;
        const int64_t before = seen.high[m] < seen.all_low ? seen.high[m] : seen.all_low;
        const int64_t after = seen.low[m] > seen.all_high ? seen.low[m] : seen.all_high;
        if (seen.low[m] < before) add_values<Form, 1>(job, values, {mine, ones, seen.low[m], before}, sums + m * size);
        if (after < seen.high[m]) add_values<Form, 1>(job, values, {mine, ones, after, seen.high[m]}, sums + m * size);
    }
}

// Processes the tile of keys and values at `first` for the query rows of one kv head.
template <typename Form, int ROWS, typename T>
void head(const Attention &job, const Span &span, int64_t kv_head, const float *query, Rows<T> keys, Rows<T> values,
          int64_t first, int64_t count, const Sums &sums) {
    alignas(64) float scores[ROWS * TILE];
    const int64_t rows = padded_rows(job, span);
    for (int64_t row = 0; row < rows; row += ROWS) {
        float factors[ROWS];
        const int64_t at = kv_head * rows + row;
        const Seen<Form, ROWS> seen(job, span, row, first, count);
        score<Form, ROWS>(job, query + at * job.padded_dim(), keys, count, scores);
        if (job.softcap > 0) cap_scores(job, scores, ROWS * TILE);
        add_scores<Form, ROWS, TILE>(scores, seen.low, seen.high, sums.softmax + at, factors);
        add_seen<Form, ROWS, T>(job, values, seen, scores, factors, sums.values + at * job.padded_value_dim());
    }
}

// The addresses of a tile's keys and values. A shorter tile repeats its last ones.
template <typename T>
struct Places {
    const T *keys[TILE], *values[TILE];
    int64_t count;
    Places(const Attention &job, const Span &span, int64_t first, int64_t last) {
        count = last - first < TILE ? last - first : TILE;
        find_keys(job, job.keys, span, first, count, keys);
        find_keys(job, job.values, span, first, count, values);
        for (int64_t i = count; i < TILE; i++) keys[i] = keys[count - 1], values[i] = values[count - 1];
    }
    // Reads the tile into cache in memory order, all heads of a token side by side. The CPU's own prefetcher follows
    // that order; it does not follow separate heads, and prefetch instructions do not help.
    void come(const Attention &job) const {
        come(keys, job.keys.head_stride, job.head_dim, job.kv_heads);
        if (values[0] != keys[0]) come(values, job.values.head_stride, job.value_dim, job.kv_heads);
    }
    void come(const T *const *rows, int64_t head_stride, int64_t dim, int64_t heads) const {
        if (heads > 1 && head_stride != dim) return;
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < heads * dim; d += int64_t(64 / sizeof(T)))
                asm volatile("" ::"r"(*reinterpret_cast<const volatile char *>(rows[i] + d)));
    }
};

// Processes keys [task.first, task.last) of a span. `query` is memory for its rows.
template <typename Form, int ROWS>
void run(const Attention &job, const Task &task, float *query, const Sums &sums) {
    typedef typename Form::Number T;
    const Span &span = job.spans[task.span];
    const int64_t group = job.group(), rows = padded_rows(job, span), size = job.padded_dim();
    std::memset(query, 0, size_t(sums.rows * size) * sizeof *query);
    for (int64_t token = 0; token < span.tokens; token++)
        for (int64_t h = 0; h < job.heads; h++)
            load_query<Form>(job, span.first_row + token, h,
                             query + (h / group * rows + token * group + h % group) * size);
    sums.begin(job);
    for (int64_t first = task.first; first < task.last; first += TILE) {
        const Places<T> places(job, span, first, task.last);
        places.come(job);
        for (int64_t h = 0; h < job.kv_heads; h++)
            head<Form, ROWS, T>(job, span, h, query, {places.keys, h * job.keys.head_stride},
                                {places.values, h * job.values.head_stride}, first, places.count, sums);
    }
}

template <typename Form>
void run(const Attention &job, const Task &task, float *query, const Sums &sums) {
    const int64_t rows = padded_rows(job, job.spans[task.span]);
    if (rows == 1) return run<Form, 1>(job, task, query, sums);
    if (rows == 2) return run<Form, 2>(job, task, query, sums);
    return run<Form, MOST_ROWS>(job, task, query, sums);
}

// The number of tasks of a span.
inline int64_t splits(const Attention &job, const Span &span) {
    return (span.start + span.tokens - job.first_key(span.start) + split(job) - 1) / split(job);
}

// Combines the sums over a span's parts, which lie one after the other, into its output. Overwrites the first part.
inline void finish(const Attention &job, const Span &span, char *parts) {
    const int64_t group = job.group(), size = job.padded_value_dim(), count = splits(job, span);
    const int64_t rows = span.tokens * group;
    const Sums whole(job, span, parts);
    for (int64_t of_head = 0; of_head < job.kv_heads * rows; of_head++) {
        const int64_t kv_head = of_head / rows, in_head = of_head % rows, head = kv_head * group + in_head % group;
        const int64_t row = kv_head * padded_rows(job, span) + in_head;
        float *values = whole.values + row * size, greatest = whole.softmax[row].greatest;
        float weight = whole.softmax[row].weight();
        for (int64_t i = 1; i < count; i++) {
            const Sums part(job, span, parts + size_t(i) * Sums::bytes(job, span));
            const float before = greatest, other = part.softmax[row].greatest;
            if (other == -__builtin_inff()) continue;  // the token sees no key of this part
            greatest = other > before ? other : before;
            const float origin = Softmax::origin(greatest);
            const float factor = Softmax::power(before - origin), other_factor = Softmax::power(other - origin);
            weight = weight * factor + part.softmax[row].weight() * other_factor;
            for (int64_t d = 0; d < size; d++)
                values[d] = values[d] * factor + part.values[row * size + d] * other_factor;
        }
        store_out(job, span.first_row + in_head / group, head, values, with_sink(job, head, greatest, weight));
    }
}

}  // namespace few_tokens
