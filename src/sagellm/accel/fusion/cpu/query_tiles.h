// A tile of queries over its keys, for one kv head (FlashAttention-2: Dao 2023). The query heads of the kv head are
// rows of one matrix. Keys are processed in tiles, laid out in cache once for all rows, as words of `Floats` or
// `Pairs`: first the scores of all rows, whose keys stay in L1, then weights times values.

#pragma once
#include "attention.h"
#include "attention_tiles.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace query_tiles {

constexpr int64_t MOST_ROWS = 480;
constexpr int64_t MOST_BYTES = 480 << 10;  // of a task's rows, so that they stay in L2
constexpr int64_t MOST_KEYS = 128;
constexpr int PANEL = 6;  // rows at a time: sums of 6 rows and 4 vectors fill the registers (2 where there are 16)
constexpr int VECTORS = WIDTH == 16 ? 4 : 2;
// Keys of a tile: 16 KiB for a head of 64 dims.
template <typename Form>
constexpr int64_t KEYS = 64 * Form::GROUP;
// Rows that meet a tile of keys at once.
template <typename Form>
constexpr int64_t ROWS = Form::IN_TILES ? 32 : PANEL;

// The most query tokens of one task.
inline int64_t tile_tokens(const Attention &job) {
    const int64_t row_bytes = (job.padded_dim() + job.padded_value_dim() + MOST_KEYS) * int64_t(sizeof(float));
    const int64_t rows = MOST_BYTES / row_bytes < MOST_ROWS ? MOST_BYTES / row_bytes : MOST_ROWS;
    return rows < job.group() ? 1 : rows / job.group();
}

// Query tokens of each task of a span but the last: equal shares.
inline int64_t share(const Attention &job, const Span &span) {
    const int64_t most = tile_tokens(job), tasks = (span.tokens + most - 1) / most;
    return (span.tokens + tasks - 1) / tasks;
}

// A thread's buffers. For rows: packed queries, panel by panel and in a panel word by word, or for registers in tiles
// row by row; scores; sums; softmax. Keys lie word by word, each word for all keys; values lie key by key, or group by
// group.
template <typename Form>
struct Buffers {
    float *query, *scores, *sums, *keys, *values, *row;
    Softmax *softmax;
    int64_t *positions;

    static int64_t rows(const Attention &job) {
        return (tile_tokens(job) * job.group() + ROWS<Form> - 1) / ROWS<Form> * ROWS<Form>;
    }
    static size_t bytes(const Attention &job) {
        const int64_t dim = job.padded_dim(), both = dim + job.padded_value_dim();
        const int64_t floats = rows(job) * (both + MOST_KEYS) + MOST_KEYS * both + 4 * dim;
        return size_t(floats) * sizeof(float) + size_t(rows(job)) * (sizeof(Softmax) + sizeof(int64_t));
    }
    Buffers(const Attention &job, void *at) {
        const int64_t dim = job.padded_dim(), value_dim = job.padded_value_dim(), count = rows(job);
        query = static_cast<float *>(at);
        scores = query + count * dim;
        sums = scores + count * MOST_KEYS;
        keys = sums + count * value_dim;
        values = keys + MOST_KEYS * dim;
        row = values + MOST_KEYS * value_dim;
        positions = reinterpret_cast<int64_t *>(row + 4 * dim);
        softmax = reinterpret_cast<Softmax *>(positions + count);
    }
};

// A task: the rows of tokens [first, last) of a span; `rows` does not count the padding of the last panel.
struct Tile {
    const Attention &job;
    const Span &span;
    int64_t kv_head, first, rows;
};

// The keys [low, high) that the query at `position` sees in the key tile at `key`; none if low >= high.
inline int64_t low_of(const Attention &job, int64_t position, int64_t key) {
    const int64_t from = job.first_key(position) - key;
    return from > 0 ? from : 0;
}
template <typename Form>
int64_t high_of(int64_t position, int64_t key) {
    return position + 1 - key < KEYS<Form> ? position + 1 - key : KEYS<Form>;
}

// The number of words of a query's or key's dims.
template <typename Form>
int64_t num_words(const Attention &job) {
    return (job.head_dim + Form::GROUP - 1) / Form::GROUP;
}

template <typename Form>
void pack_query(const Tile &tile, Buffers<Form> &to) {
    const int64_t dim = tile.job.padded_dim(), group = tile.job.group(), words = num_words<Form>(tile.job);
    const int64_t rows = Buffers<Form>::rows(tile.job);
    std::memset(to.query, 0, size_t(rows * dim) * sizeof *to.query);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = tile.first + (row < tile.rows ? row : tile.rows - 1) / group;
        to.positions[row] = tile.span.start + token;
        to.softmax[row].begin();
        if (row >= tile.rows) continue;
        load_query<Form>(tile.job, tile.span.first_row + token, tile.kv_head * group + row % group, to.row);
        if (Form::IN_TILES) {
            std::memcpy(to.query + row * dim, to.row, size_t(words) * sizeof *to.row);
            continue;
        }
        float *lane = to.query + row / PANEL * PANEL * dim + row % PANEL;
        for (int64_t d = 0; d < words; d++) lane[d * PANEL] = to.row[d];
    }
}

// Transposes four rows of words: to[d * KEYS + i] = from[i * size + d].
template <typename Form>
void turn(const float *from, int64_t size, float *to) {
#if defined(__SSE__)
    for (int64_t d = 0; d < size; d += 4) {
        __m128 a = _mm_loadu_ps(from + d), b = _mm_loadu_ps(from + size + d);
        __m128 c = _mm_loadu_ps(from + 2 * size + d), e = _mm_loadu_ps(from + 3 * size + d);
        _MM_TRANSPOSE4_PS(a, b, c, e);
        _mm_storeu_ps(to + d * KEYS<Form>, a), _mm_storeu_ps(to + (d + 1) * KEYS<Form>, b);
        _mm_storeu_ps(to + (d + 2) * KEYS<Form>, c), _mm_storeu_ps(to + (d + 3) * KEYS<Form>, e);
    }
#else
    for (int64_t d = 0; d < size; d++)
        for (int64_t i = 0; i < 4; i++) to[d * KEYS<Form> + i] = from[i * size + d];
#endif
}

// Packs the words of a key, with zeros up to a whole vector.
template <typename Form>
void pack_key(const typename Form::Number *from, int64_t dim, float *to) {
    constexpr int64_t STEP = WIDTH * Form::GROUP;
    const int64_t whole = dim / STEP * STEP;
    for (int64_t d = 0; d < whole; d += STEP) save(to + d / Form::GROUP, Form::words(from + d));
    if (whole < dim) save(to + whole / Form::GROUP, Form::words(from + whole, dim - whole));
}

// Packs the words of GROUP keys' values, with zeros up to a whole vector.
template <typename Form>
void pack_values(const typename Form::Number *first, const typename Form::Number *second, int64_t dim, float *to) {
    int64_t d = 0;
    for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH) {
        Vector both[2];
        Form::across(first + d, second + d, both);
        save(to + d, both[0]), save(to + d + WIDTH, both[1]);
    }
    for (; d < dim; d += WIDTH)
        save(to + d, Form::across(first + d, second + d, dim - d < WIDTH ? dim - d : WIDTH));
}

// The addresses of a tile's keys, at most KEYS, and of their values.
template <typename Form>
struct Places {
    typedef typename Form::Number T;
    const T *keys[KEYS<Form>], *values[KEYS<Form>];
    int64_t first, count;

    Places(const Tile &tile, int64_t from, int64_t end) : first(from) {
        const Attention &job = tile.job;
        count = end - first < KEYS<Form> ? end - first : KEYS<Form>;
        if (count <= 0) return;
        const int64_t key = tile.kv_head * job.keys.head_stride, value = tile.kv_head * job.values.head_stride;
        find_keys(job, job.keys, tile.span, first, count, keys);
        find_keys(job, job.values, tile.span, first, count, values);
        for (int64_t i = 0; i < count; i++) keys[i] += key, values[i] += value;
    }

    // Prefetches the i-th of `of` equal shares to L2.
    void prefetch(int64_t i, int64_t of, const Attention &job) const {
        for (int64_t j = i * count / of; j < (i + 1) * count / of; j++) {
            for (int64_t d = 0; d < job.head_dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(keys[j] + d, 0, 2);
            if (values[j] == keys[j]) continue;
            for (int64_t d = 0; d < job.value_dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(values[j] + d, 0, 2);
        }
    }
};

// Packs a tile's keys, with zeros up to KEYS, and values.
template <typename Form>
void pack_tile(const Attention &job, const Places<Form> &from, Buffers<Form> &to) {
    constexpr int64_t STEP = WIDTH * Form::GROUP;
    const int64_t dim = job.head_dim, size = job.padded_value_dim(), words = (dim + STEP - 1) / STEP * WIDTH;
    for (int64_t j = 0; j < KEYS<Form>; j += 4) {
        for (int64_t i = j; i < j + 4; i++) {
            float *key = to.row + (i - j) * words;
            if (i < from.count)
                pack_key<Form>(from.keys[i], dim, key);
            else
                std::memset(key, 0, size_t(words) * sizeof *key);
        }
        turn<Form>(to.row, words, to.keys + j);
    }
    for (int64_t i = 0; i < from.count; i += Form::GROUP) {
        const int64_t last = i + Form::GROUP <= from.count ? i + Form::GROUP - 1 : i;
        pack_values<Form>(from.values[i], from.values[last], job.value_dim, to.values + i / Form::GROUP * size);
    }
}

// Computes `factor` times the scores of a panel's rows and all keys of the tile, from `words` words of each.
template <typename Form>
void score(const float *query, const float *keys, int64_t words, float factor, float *scores) {
    for (int64_t key = 0; key < KEYS<Form>; key += VECTORS * WIDTH) {
        Vector sum[PANEL][VECTORS];
        UNROLL_ALL for (int m = 0; m < PANEL; m++) UNROLL_ALL for (int v = 0; v < VECTORS; v++) sum[m][v] = zero();
        for (int64_t d = 0; d < words; d++) {
            Vector column[VECTORS];
            UNROLL_ALL for (int v = 0; v < VECTORS; v++) column[v] = load(keys + d * KEYS<Form> + key + v * WIDTH);
            UNROLL_ALL for (int m = 0; m < PANEL; m++) {
                const Vector row = all(query[d * PANEL + m]);
                UNROLL_ALL for (int v = 0; v < VECTORS; v++) sum[m][v] = Form::add(row, column[v], sum[m][v]);
            }
        }
        UNROLL_ALL for (int m = 0; m < PANEL; m++) UNROLL_ALL for (int v = 0; v < VECTORS; v++)
            save(scores + m * KEYS<Form> + key + v * WIDTH, multiply(sum[m][v], all(factor)));
    }
}

// Scales COUNT vectors of the sums of ROWS rows, then adds weighted values of keys [low, high) to them. With several
// rows the keys are whole groups.
template <typename Form, int ROWS, int COUNT>
void add_vectors(const float *values, const float *weights, const float *factors, int64_t low, int64_t high,
                 int64_t size, float *sums) {
    Vector sum[ROWS][COUNT];
    UNROLL_ALL for (int m = 0; m < ROWS; m++) UNROLL_ALL for (int v = 0; v < COUNT; v++)
        sum[m][v] = multiply(load(sums + m * size + v * WIDTH), all(factors[m]));
    for (int64_t j = low / Form::GROUP; j * Form::GROUP < high; j++) {
        Vector value[COUNT];
        UNROLL_ALL for (int v = 0; v < COUNT; v++) {
            value[v] = load(values + j * size + v * WIDTH);
            if constexpr (ROWS == 1) value[v] = Form::without(value[v], j * Form::GROUP, low, high);
        }
        UNROLL_ALL for (int m = 0; m < ROWS; m++) {
            const Vector weight = all(weights[m * KEYS<Form> + j]);
            UNROLL_ALL for (int v = 0; v < COUNT; v++) sum[m][v] = Form::add(weight, value[v], sum[m][v]);
        }
    }
    UNROLL_ALL for (int m = 0; m < ROWS; m++) UNROLL_ALL for (int v = 0; v < COUNT; v++)
        save(sums + m * size + v * WIDTH, sum[m][v]);
}

template <typename Form, int ROWS>
void add_values(const float *values, const float *weights, const float *factors, int64_t low, int64_t high,
                int64_t size, float *sums) {
    int64_t d = 0;
    for (; d + VECTORS * WIDTH <= size; d += VECTORS * WIDTH)
        add_vectors<Form, ROWS, VECTORS>(values + d, weights, factors, low, high, size, sums + d);
    for (; d < size; d += WIDTH) add_vectors<Form, ROWS, 1>(values + d, weights, factors, low, high, size, sums + d);
}

// Turns the scores of a panel's rows into weights and adds the weighted values of the key tile at `key`. A row must not
// touch keys that it does not see, whose values may be inf or NaN: groups that all rows see are added for all rows at
// once, the rest row by row.
template <typename Form>
void add_panel(const Attention &job, Buffers<Form> &buffers, int64_t row, int64_t key) {
    static const float ones[1] = {1.0f};
    const int64_t size = job.padded_value_dim();
    float *weights = buffers.scores + row * KEYS<Form>, *sums = buffers.sums + row * size, factors[PANEL];
    int64_t low[PANEL], high[PANEL], from = 0, to = KEYS<Form>;
    for (int m = 0; m < PANEL; m++) {
        low[m] = low_of(job, buffers.positions[row + m], key), high[m] = high_of<Form>(buffers.positions[row + m], key);
        from = low[m] > from ? low[m] : from;
        to = high[m] < to ? high[m] : to;
    }
    from = (from + Form::GROUP - 1) / Form::GROUP * Form::GROUP, to = to / Form::GROUP * Form::GROUP;
    if (to < from) to = from;
    add_scores<Form, PANEL, KEYS<Form>>(weights, low, high, buffers.softmax + row, factors);
    add_values<Form, PANEL>(buffers.values, weights, factors, from, to, size, sums);
    for (int m = 0; m < PANEL; m++) {
        const float *mine = weights + m * KEYS<Form>;
        const int64_t before = high[m] < from ? high[m] : from, after = low[m] > to ? low[m] : to;
        if (low[m] < before) add_values<Form, 1>(buffers.values, mine, ones, low[m], before, size, sums + m * size);
        if (after < high[m]) add_values<Form, 1>(buffers.values, mine, ones, after, high[m], size, sums + m * size);
    }
}

#if defined(__AMX_BF16__) && defined(__linux__)
// The same for 32 rows, their scores included. A key that a row does not see has weight 0, and its values are added too
// if all of them are finite.
template <typename Form>
void add_block(const Tile &tile, Buffers<Form> &buffers, int64_t row, int64_t key, int64_t words, bool are_finite) {
    const Attention &job = tile.job;
    const int64_t size = job.padded_value_dim(), count = tile.rows - row < ROWS<Form> ? tile.rows - row : ROWS<Form>;
    float *scores = buffers.scores + row * KEYS<Form>, *sums = buffers.sums + row * size, factors[ROWS<Form>];
    int64_t low[ROWS<Form>] = {}, high[ROWS<Form>] = {}, from = KEYS<Form>, to = 0;
    for (int64_t m = 0; m < count; m++) {
        low[m] = low_of(job, buffers.positions[row + m], key), high[m] = high_of<Form>(buffers.positions[row + m], key);
        if (low[m] >= high[m]) continue;
        from = low[m] < from ? low[m] : from;
        to = high[m] > to ? high[m] : to;
    }
    constexpr int64_t STEP = attention_tiles::KEYS_AT_ONCE;
    from = from / STEP * STEP, to = (to + STEP - 1) / STEP * STEP;
    attention_tiles::score(buffers.query + row * job.padded_dim(), job.padded_dim(), buffers.keys, KEYS<Form>,
                           (words + WIDTH - 1) / WIDTH * WIDTH, from, to, scores);
    const Vector factor = all(job.factor());
    for (int64_t m = 0; m < count; m++) {
        float *mine = scores + m * KEYS<Form>;
        for (int64_t i = from; i < to; i += WIDTH) save(mine + i, multiply(load(mine + i), factor));
        if (job.softcap > 0) cap_scores(job, mine + from, to - from);
    }
    add_scores<Form, ROWS<Form>, KEYS<Form>>(scores, low, high, buffers.softmax + row, factors);
    for (int64_t m = 0; m < count; m++) {
        float *mine = scores + m * KEYS<Form>;
        if (!are_finite) {
            if (low[m] < high[m])
                add_values<Form, 1>(buffers.values, mine, factors + m, low[m], high[m], size, sums + m * size);
            continue;
        }
        const bool sees = low[m] < high[m];
        const int64_t first = sees ? low[m] / WIDTH * WIDTH : to, last = sees ? (high[m] + WIDTH - 1) / WIDTH * WIDTH : to;
        for (int64_t i = from; i < first; i += Form::GROUP) mine[i / Form::GROUP] = 0.0f;
        for (int64_t i = last; i < to; i += Form::GROUP) mine[i / Form::GROUP] = 0.0f;
        if (factors[m] == 1.0f) continue;
        for (int64_t d = 0; d < size; d += WIDTH)
            save(sums + m * size + d, multiply(load(sums + m * size + d), all(factors[m])));
    }
    if (are_finite) attention_tiles::add_values(scores, KEYS<Form>, buffers.values, size, from, to, sums);
}

// Adds the key tile at `places` for all blocks of rows that see a key of it.
template <typename Form>
void add_blocks(const Tile &tile, Buffers<Form> &buffers, const Places<Form> &places, const Places<Form> &next,
                int64_t words, int64_t first, int64_t last) {
    const int64_t size = tile.job.padded_value_dim(), pairs = (places.count + 1) / 2, blocks = (last - first + 31) / 32;
    std::memset(buffers.values + pairs * size, 0, size_t((KEYS<Form> / 2 - pairs) * size) * sizeof *buffers.values);
    const bool are_finite = attention_tiles::are_finite(buffers.values, pairs * size);
    for (int64_t i = 0; i < blocks; i++) {
        next.prefetch(i, blocks, tile.job);
        add_block<Form>(tile, buffers, first + i * ROWS<Form>, places.first, words, are_finite);
    }
}
#endif

// The rows [first, last) of panels that see a key of the tile at `key`.
template <typename Form>
void visible_rows(const Tile &tile, const Buffers<Form> &buffers, int64_t key, int64_t &first, int64_t &last) {
    constexpr int64_t STEP = ROWS<Form>;
    first = 0, last = tile.rows;
    while (first < last && high_of<Form>(buffers.positions[first + STEP - 1], key) <= 0) first += STEP;
    while (last > first && low_of(tile.job, buffers.positions[(last - 1) / STEP * STEP], key) >= KEYS<Form>)
        last = (last - 1) / STEP * STEP;
}

// Adds the key tile at `places` for all panels of rows that see a key of it.
template <typename Form>
void add_panels(const Tile &tile, Buffers<Form> &buffers, const Places<Form> &places, const Places<Form> &next,
                int64_t words, int64_t first, int64_t last) {
    const Attention &job = tile.job;
    const int64_t panels = (last - first + PANEL - 1) / PANEL;
    for (int64_t i = 0, row = first; i < panels; i++, row += PANEL) {
        next.prefetch(i, panels, job);
        float *scores = buffers.scores + row * KEYS<Form>;
        score<Form>(buffers.query + row * job.padded_dim(), buffers.keys, words, job.factor(), scores);
        if (job.softcap > 0) cap_scores(job, scores, PANEL * KEYS<Form>);
    }
    for (int64_t row = first; row < last; row += PANEL) add_panel<Form>(job, buffers, row, places.first);
}

template <typename Form>
void run(const Attention &job, const Task &task, void *memory) {
    Buffers<Form> buffers(job, memory);
    const Tile tile = {job, job.spans[task.span], task.kv_head, task.first, (task.last - task.first) * job.group()};
    const int64_t size = job.padded_value_dim(), end = tile.span.start + task.last, words = num_words<Form>(job);
    pack_query<Form>(tile, buffers);
    std::memset(buffers.sums, 0, size_t(Buffers<Form>::rows(job) * size) * sizeof *buffers.sums);
    Places<Form> places(tile, job.first_key(buffers.positions[0]), end);
#if defined(__AMX_BF16__) && defined(__linux__)
    if constexpr (Form::IN_TILES) attention_tiles::begin();
#endif
    while (places.count > 0) {
        const Places<Form> next(tile, places.first + KEYS<Form>, end);
        int64_t first, last;
        pack_tile<Form>(job, places, buffers);
        visible_rows<Form>(tile, buffers, places.first, first, last);
#if defined(__AMX_BF16__) && defined(__linux__)
        if constexpr (Form::IN_TILES)
            add_blocks<Form>(tile, buffers, places, next, words, first, last);
        else
#endif
            add_panels<Form>(tile, buffers, places, next, words, first, last);
        places = next;
    }
#if defined(__AMX_BF16__) && defined(__linux__)
    if constexpr (Form::IN_TILES) attention_tiles::end();
#endif
    for (int64_t row = 0; row < tile.rows; row++) {
        const int64_t head = tile.kv_head * job.group() + row % job.group();
        const Softmax &softmax = buffers.softmax[row];
        store_out(job, tile.span.first_row + buffers.positions[row] - tile.span.start, head, buffers.sums + row * size,
                  with_sink(job, head, softmax.greatest, softmax.weight()));
    }
}

}  // namespace query_tiles
