// Products of bfloat16 in tiles of registers (Intel AMX): 16 rows of x times 16 outputs, 32 inputs in one instruction.
// Panels are read as they lie: a pair of inputs of 64 outputs is one row of four tiles.

#pragma once
#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace tiles {

constexpr int64_t ROWS = 16, INPUTS = 32, PANEL = 64, HALF = PANEL / 2;
// Inputs of 32 outputs that stay in L1 while the rows of a chunk meet them.
constexpr int64_t BLOCK = 256;
constexpr int64_t AHEAD_BYTES = 4096, LINE = 64;
constexpr int64_t STEP = INPUTS * PANEL, TILE = 2 * ROWS;  // numbers of a panel in a step, and in a row of a tile
constexpr int64_t SUMS_BYTES = PANEL * sizeof(float), WEIGHTS_BYTES = 2 * PANEL * sizeof(BFloat16);

// Whether the system lets this process use the tiles' registers: it asks once.
inline bool are_granted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
    return granted;
}

// The compiler does not know which memory the instructions for tiles read and write.
inline void memory_is_current() { asm volatile("" ::: "memory"); }

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// Sums are in tiles 0 to 3. One tile of x (4) meets four of weights: all outputs of a panel.
inline void shape_for_one(int64_t rows) {
    Shapes shapes;
    for (int tile : {0, 1, 2, 3, 4}) shapes.rows[tile] = uint8_t(rows);
    for (int tile : {5, 6, 7}) shapes.rows[tile] = ROWS;
    memory_is_current();
    _tile_loadconfig(&shapes);
}

// Two tiles of x (4 and 5, the second with `rows` rows) meet two of weights (6 and 7): half of a panel's outputs.
inline void shape_for_two(int64_t rows) {
    Shapes shapes;
    for (int tile : {0, 1, 4, 6, 7}) shapes.rows[tile] = ROWS;
    for (int tile : {2, 3, 5}) shapes.rows[tile] = uint8_t(rows);
    memory_is_current();
    _tile_loadconfig(&shapes);
}

// Fetches the weights of a later step, of all outputs of the panel. It may point past the end: that does nothing.
inline void fetch_ahead(const BFloat16 *weights) {
    const uintptr_t next = uintptr_t(weights) + AHEAD_BYTES;
    for (int64_t at = 0; at < STEP * int64_t(sizeof *weights); at += LINE)
        __builtin_prefetch(reinterpret_cast<const void *>(next + uintptr_t(at)), 0, 3);
}

inline void step_of_one(const BFloat16 *x, int64_t x_bytes, const BFloat16 *weights) {
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(5, weights, WEIGHTS_BYTES);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weights + TILE, WEIGHTS_BYTES);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weights + 2 * TILE, WEIGHTS_BYTES);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weights + 3 * TILE, WEIGHTS_BYTES);
    _tile_dpbf16ps(3, 4, 5);
}

inline void step_of_two(const BFloat16 *x, int64_t x_bytes, const BFloat16 *weights) {
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, weights, WEIGHTS_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + TILE, WEIGHTS_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, reinterpret_cast<const char *>(x) + ROWS * x_bytes, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// The last inputs of rows and of a panel, followed by zeros.
struct Rest {
    alignas(64) BFloat16 x[2 * ROWS * INPUTS], weights[STEP];
    Rest(const BFloat16 *from, int64_t stride, int64_t rows, const BFloat16 *panel, int64_t outputs, int64_t inputs) {
        std::memset(static_cast<void *>(this), 0, sizeof *this);
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(static_cast<void *>(x + row * INPUTS), from + row * stride, size_t(inputs) * sizeof *x);
        for (int64_t pair = 0; pair < (inputs + 1) / 2; pair++)
            std::memcpy(static_cast<void *>(weights + 2 * pair * PANEL), panel + 2 * pair * PANEL,
                        size_t(2 * outputs) * sizeof *weights);
        memory_is_current();
    }
};

// `sums` [rows, PANEL] of up to 16 rows.
inline void one(const BFloat16 *x, int64_t stride, int64_t rows, const BFloat16 *weights, int64_t inputs, float *sums) {
    shape_for_one(rows);
    zero_sums();
    int64_t k = 0;
    for (; k + INPUTS <= inputs; k += INPUTS, weights += STEP) {
        fetch_ahead(weights);
        step_of_one(x + k, stride * int64_t(sizeof *x), weights);
    }
    if (k < inputs) {
        const Rest rest(x + k, stride, rows, weights, PANEL, inputs - k);
        step_of_one(rest.x, INPUTS * sizeof *x, rest.weights);
    }
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + 16, SUMS_BYTES);
    _tile_stored(2, sums + 32, SUMS_BYTES);
    _tile_stored(3, sums + 48, SUMS_BYTES);
}

// Adds `inputs` inputs of half a panel to `sums` of 17 to 32 rows; if `first`, stores them. With `ahead`, it fetches the
// weights of later steps.
inline void two(const BFloat16 *x, int64_t stride, int64_t rows, const BFloat16 *weights, int64_t inputs, bool first,
                bool ahead, float *sums) {
    float *below = sums + ROWS * PANEL;
    if (first) {
        zero_sums();
    } else {
        _tile_loadd(0, sums, SUMS_BYTES);
        _tile_loadd(1, sums + 16, SUMS_BYTES);
        _tile_loadd(2, below, SUMS_BYTES);
        _tile_loadd(3, below + 16, SUMS_BYTES);
    }
    int64_t k = 0;
    for (; k + INPUTS <= inputs; k += INPUTS, weights += STEP) {
        if (ahead) fetch_ahead(weights);
        step_of_two(x + k, stride * int64_t(sizeof *x), weights);
    }
    if (k < inputs) {
        const Rest rest(x + k, stride, rows, weights, HALF, inputs - k);
        step_of_two(rest.x, INPUTS * sizeof *x, rest.weights);
    }
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + 16, SUMS_BYTES);
    _tile_stored(2, below, SUMS_BYTES);
    _tile_stored(3, below + 16, SUMS_BYTES);
}

// `sums` [rows, PANEL] of rows of x times one panel. Each row adds in the same order, however many there are.
inline void multiply(const BFloat16 *x, int64_t stride, int64_t rows, const BFloat16 *panel, int64_t inputs,
                     float *sums) {
    memory_is_current();
    if (rows <= 2 * ROWS) {  // so few rows wait for memory: the panel is read once, as it lies, and then from cache
        for (int64_t row = 0; row < rows; row += ROWS)
            one(x + row * stride, stride, std::min(ROWS, rows - row), panel, inputs, sums + row * PANEL);
        _tile_release();
        return memory_is_current();
    }
    const int64_t whole = rows % (2 * ROWS) > ROWS ? rows : rows - rows % (2 * ROWS);
    for (int64_t k = 0; k < inputs && whole; k += BLOCK) {
        const int64_t count = std::min(BLOCK, inputs - k);
        for (int64_t half = 0; half < 2; half++) {
            shape_for_two(ROWS);
            for (int64_t row = 0; row < whole; row += 2 * ROWS) {
                const int64_t those = std::min(2 * ROWS, whole - row);
                if (those < 2 * ROWS) shape_for_two(those - ROWS);
                two(x + row * stride + k, stride, those, panel + k * PANEL + half * 2 * HALF, count, !k,
                    !row && !half, sums + row * PANEL + half * HALF);
            }
        }
    }
    if (whole < rows) one(x + whole * stride, stride, rows - whole, panel, inputs, sums + whole * PANEL);
    _tile_release();
    memory_is_current();
}

}  // namespace tiles
#endif
