// Scores, and weights times values, of 32 rows in tiles of registers (Intel AMX; see tiles.h). Words of `Pairs` are what
// the tiles take: a row of a tile of keys or values is one word of 16 keys or dims.

#pragma once
#include "tiles.h"
#if defined(__AMX_BF16__) && defined(__linux__)
#include "attention.h"

namespace attention_tiles {

constexpr int64_t SIDE = 16;  // rows of a tile, and its words in a row
constexpr int64_t ROWS = 2 * SIDE;
constexpr int64_t KEYS_AT_ONCE = 2 * SIDE;  // of one instruction's weights

// Sums are in tiles 0 to 3, rows in 4 and 5, keys or values in 6 and 7.
inline void begin() {
    tiles::Shapes shapes;
    for (uint8_t &rows : shapes.rows) rows = SIDE;
    for (int tile = 8; tile < 16; tile++) shapes.rows[tile] = 0;
    tiles::memory_is_current();
    _tile_loadconfig(&shapes);
}

inline void end() {
    _tile_release();
    tiles::memory_is_current();
}

// Products of ROWS rows and the keys [first, last), multiples of 32, from `words` words of each, a multiple of 16. A
// row of the query has `row_words`, a row of keys and of `scores` one word per key, `num_keys` in all.
inline void score(const float *query, int64_t row_words, const float *keys, int64_t num_keys, int64_t words,
                  int64_t first, int64_t last, float *scores) {
    const int64_t row_bytes = row_words * int64_t(sizeof(float)), key_bytes = num_keys * int64_t(sizeof(float));
    tiles::memory_is_current();
    for (int64_t key = first; key < last; key += 2 * SIDE) {
        tiles::zero_sums();
        for (int64_t word = 0; word < words; word += SIDE) {
            const float *column = keys + word * num_keys + key;
            _tile_loadd(4, query + word, row_bytes);
            _tile_loadd(6, column, key_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, column + SIDE, key_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, query + SIDE * row_words + word, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float *to = scores + key, *below = to + SIDE * num_keys;
        _tile_stored(0, to, key_bytes);
        _tile_stored(1, to + SIDE, key_bytes);
        _tile_stored(2, below, key_bytes);
        _tile_stored(3, below + SIDE, key_bytes);
    }
    tiles::memory_is_current();
}

// Adds the values of keys [first, last), multiples of 32, to the sums [ROWS, size] of ROWS rows; `weights` are words,
// `row_words` apart.
inline void add_values(const float *weights, int64_t row_words, const float *values, int64_t size, int64_t first,
                       int64_t last, float *sums) {
    const int64_t row_bytes = row_words * int64_t(sizeof(float)), sum_bytes = size * int64_t(sizeof(float));
    tiles::memory_is_current();
    for (int64_t dim = 0; dim < size; dim += 2 * SIDE) {
        float *to = sums + dim, *below = to + SIDE * size;
        const bool is_wide = dim + 2 * SIDE <= size;
        _tile_loadd(0, to, sum_bytes);
        _tile_loadd(2, below, sum_bytes);
        if (is_wide) {
            _tile_loadd(1, to + SIDE, sum_bytes);
            _tile_loadd(3, below + SIDE, sum_bytes);
        }
        for (int64_t key = first; key < last; key += KEYS_AT_ONCE) {
            const float *value = values + key / 2 * size + dim;
            _tile_loadd(4, weights + key / 2, row_bytes);
            _tile_loadd(6, value, sum_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, weights + SIDE * row_words + key / 2, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (!is_wide) continue;
            _tile_loadd(7, value + SIDE, sum_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, sum_bytes);
        _tile_stored(2, below, sum_bytes);
        if (is_wide) {
            _tile_stored(1, to + SIDE, sum_bytes);
            _tile_stored(3, below + SIDE, sum_bytes);
        }
    }
    tiles::memory_is_current();
}

// Whether none of `count` words, a multiple of 16, has an inf or NaN.
inline bool are_finite(const float *words, int64_t count) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for (int64_t i = 0; i < count; i += WIDTH)
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(words + i), exponent), exponent);
    return !found;
}

}  // namespace attention_tiles
#endif
