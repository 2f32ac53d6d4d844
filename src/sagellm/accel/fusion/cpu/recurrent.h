// What the kernels for recurrent layers share: a causal convolution, and a step of a head's state.

#pragma once
#include <cmath>
#include <cstdint>

#include "elements.h"

namespace recurrent {

constexpr int64_t ALONE = 1 << 15;  // numbers in all states that one thread updates alone: some microseconds

// A head's token. Its state [key_dim, value_dim] keeps the share `left`, takes in key x `beta` value, and is read by
// the query.
struct Token {
    const float *query, *key, *value;
    float left, beta;
};

// Columns of a state [key_dim, stride] by N vectors, of which `count` columns exist. `out` are the same columns of the
// output. If it is `CORRECTED` (the delta rule), what the state has under the key is taken from the value before.
template <int N, bool CORRECTED>
void columns(const Token &token, float *state, int64_t key_dim, int64_t stride, const float *value, float *out,
             int64_t count) {
    Vector added[N], read[N];
    for (int n = 0; n < N; n++) added[n] = read[n] = zero();
    if (CORRECTED)
        for (int64_t i = 0; i < key_dim; i++)
            for (int n = 0; n < N; n++)
                added[n] = multiply_add(take(state + i * stride + n * WIDTH, count - n * WIDTH), all(token.key[i]), added[n]);
    const Vector left = all(token.left);
    for (int n = 0; n < N; n++) {
        const Vector error = difference(take(value + n * WIDTH, count - n * WIDTH), multiply(added[n], left));
        added[n] = multiply(error, all(token.beta));
    }
    for (int64_t i = 0; i < key_dim; i++) {
        const Vector key = all(token.key[i]), query = all(token.query[i]);
        for (int n = 0; n < N; n++) {
            float *at = state + i * stride + n * WIDTH;
            const Vector now = multiply_add(key, added[n], multiply(take(at, count - n * WIDTH), left));
            put(at, now, count - n * WIDTH);
            read[n] = multiply_add(now, query, read[n]);
        }
    }
    for (int n = 0; n < N; n++) put(out + n * WIDTH, read[n], count - n * WIDTH);
}

template <bool CORRECTED>
void update(const Token &token, float *state, int64_t key_dim, int64_t value_dim, float *out) {
    constexpr int N = 4;
    int64_t first = 0;
    for (; value_dim - first >= N * WIDTH; first += N * WIDTH)
        columns<N, CORRECTED>(token, state + first, key_dim, value_dim, token.value + first, out + first, N * WIDTH);
    by_vectors(first, value_dim, [&](int64_t i, int64_t left) {
        columns<1, CORRECTED>(token, state + i, key_dim, value_dim, token.value + i, out + i, left);
    });
}

// A convolution over the last `width` tokens, with weights [width, channels], and a bias [channels] or null.
template <typename T>
struct Convolution {
    const T *weights, *bias;
    int64_t channels, width;

    // Writes `count` channels from `first` on, after SiLU, to `to`, and moves their tail [width - 1, channels] on.
    void step(const T *newest_inputs, T *tail, int64_t first, int64_t count, float *to) const {
        const int64_t kept = width - 1;
        by_vectors(0, count, [&](int64_t n, int64_t left) {
            const int64_t i = first + n;
            const Vector newest = take(newest_inputs + i, left);
            Vector sum = multiply(newest, take(weights + kept * channels + i, left));
            for (int64_t t = 0; t < kept; t++) {
                const Vector seen = take(tail + t * channels + i, left);
                sum = multiply_add(seen, take(weights + t * channels + i, left), sum);
                if (t) put(tail + (t - 1) * channels + i, seen, left);
            }
            if (kept) put(tail + (kept - 1) * channels + i, newest, left);
            put(to + n, silu(bias ? sum + take(bias + i, left) : sum), left);
        });
    }
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace recurrent
