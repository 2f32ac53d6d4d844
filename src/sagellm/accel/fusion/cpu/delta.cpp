// One token of each of several sequences by the gated delta rule (Yang et al. 2024, arXiv:2412.06464): all of a layer
// that lies between its matrices. Sums and products are float32; a state is read and written once.

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "elements.h"
#include "recurrent.h"
#include "scratch.h"

// A row of `mixed` has the queries and keys of `key_heads` heads and the values of `heads` heads, its channels, and
// then the output gates. A row of `gates` has the betas, then the step sizes. Row i continues the state `slots[i]`;
// no two rows have the same. `tails` [num_slots, width - 1, channels] are the last inputs of the convolution, whose
// weights are `conv` [width, channels]; `states` are [num_slots, heads, key_dim, value_dim]. y is [rows, heads x
// value_dim]. Strides are those of rows and slots, in elements.
struct DeltaStep {
    const void *mixed;
    const void *gates;
    const int64_t *slots;
    void *tails;
    float *states;
    const void *conv;
    const float *decay;
    const float *step_bias;
    const void *norm;
    void *y;
    int64_t rows, key_heads, heads, key_dim, value_dim, width, num_slots;
    int64_t mixed_stride, gates_stride, tail_stride, state_stride;
    float eps;
    int32_t type;

    int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
    int64_t shared() const { return heads / key_heads; }
};

namespace delta {

using namespace recurrent;

constexpr float NORM_EPS = 1e-6f;
inline void to_length(float *x, int64_t count, float length) {
    Squares squares;
    by_vectors(0, count, [&](int64_t i, int64_t left) { squares.add(take(x + i, left)); });
    const Vector factor = all(length / std::sqrt(squares.sum() + NORM_EPS));
    by_vectors(0, count, [&](int64_t i, int64_t left) { put(x + i, multiply(take(x + i, left), factor), left); });
}

// y = RMSNorm(x) weight silu(gate).
template <typename T>
void gated_norm(const float *x, const T *weight, const T *gate, int64_t count, float eps, T *y) {
    Squares squares;
    by_vectors(0, count, [&](int64_t i, int64_t left) { squares.add(take(x + i, left)); });
    const Vector scale = all(squares.scale(count, eps));
    by_vectors(0, count, [&](int64_t i, int64_t left) {
        const Vector normed = multiply(multiply(take(x + i, left), scale), take(weight + i, left));
        put(y + i, multiply(normed, silu(take(gate + i, left))), left);
    });
}

// The heads of one row that share the key head `g`. `floats` has room for a query, a key, their values and an output.
template <typename T>
void heads_of_key(const DeltaStep &job, int64_t row, int64_t g, float *floats) {
    const int64_t keys = job.key_heads * job.key_dim, shared = job.shared(), slot = job.slots[row];
    const T *mixed = static_cast<const T *>(job.mixed) + row * job.mixed_stride;
    const T *gates = static_cast<const T *>(job.gates) + row * job.gates_stride;
    T *tail = static_cast<T *>(job.tails) + slot * job.tail_stride;
    float *query = floats, *key = query + job.key_dim, *value = key + job.key_dim;
    float *out = value + shared * job.value_dim;
    const Convolution<T> conv = {static_cast<const T *>(job.conv), nullptr, job.channels(), job.width};
    conv.step(mixed, tail, g * job.key_dim, job.key_dim, query);
    conv.step(mixed, tail, keys + g * job.key_dim, job.key_dim, key);
    conv.step(mixed, tail, 2 * keys + g * shared * job.value_dim, shared * job.value_dim, value);
    to_length(query, job.key_dim, 1.0f / std::sqrt(float(job.key_dim)));
    to_length(key, job.key_dim, 1.0f);
    for (int64_t h = g * shared; h < (g + 1) * shared; h++, value += job.value_dim) {
        const float step = as_float(gates[job.heads + h]) + job.step_bias[h];
        const Token token = {query, key, value, std::exp(-std::exp(job.decay[h]) * softplus(step)),
                             1.0f / (1.0f + std::exp(-as_float(gates[h])))};
        float *state = job.states + slot * job.state_stride + h * job.key_dim * job.value_dim;
        update<true>(token, state, job.key_dim, job.value_dim, out);
        const int64_t at = h * job.value_dim;
        gated_norm(out, static_cast<const T *>(job.norm), mixed + job.channels() + at, job.value_dim, job.eps,
                   static_cast<T *>(job.y) + row * job.heads * job.value_dim + at);
    }
}

// Returns false if there is no memory.
template <typename T>
bool step(const DeltaStep &job, int32_t threads) {
    static thread_local Scratch scratch;
    const int64_t tasks = job.rows * job.key_heads, work = job.rows * job.heads * job.key_dim * job.value_dim;
    const size_t room = size_t(2 * job.key_dim + (job.shared() + 1) * job.value_dim) * sizeof(float);
    std::atomic<bool> failed{false};
    std::atomic<int64_t> next{0};
    threads::together(work < ALONE ? 1 : tasks < threads ? int32_t(tasks) : threads, [&] {
        auto *floats = static_cast<float *>(scratch.at_least(room));
        if (!floats) failed = true;
        for (int64_t at; !failed && (at = next.fetch_add(1)) < tasks;)
            heads_of_key<T>(job, at / job.key_heads, at % job.key_heads, floats);
    });
    return !failed;
}

}  // namespace delta

// All slots are checked before anything is changed.
extern "C" EXPORTED int32_t sagellm_delta_step(const DeltaStep *job, int32_t threads) {
    for (int64_t row = 0; row < job->rows; row++)
        if (job->slots[row] < 0 || job->slots[row] >= job->num_slots) return BAD_INDEX;
    return by_type(job->type, [&](auto number) {
        return delta::step<decltype(number)>(*job, threads) ? DONE : NO_MEMORY;
    });
}
