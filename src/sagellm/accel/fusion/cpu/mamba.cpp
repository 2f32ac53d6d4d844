// One token of each of several sequences by Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): of a layer what lies between
// the input projection and the norm. Sums and products are float32; a state is read and written once.

#include <atomic>
#include <cmath>
#include <cstdint>

#include "elements.h"
#include "recurrent.h"

// A row of `projected` has the output gates, the channels of the convolution (the values of `heads` heads, what `groups`
// groups write to states, and what they read), and the step sizes. Row i continues the state `slots[i]`; no two rows
// have the same. `tails` [num_slots, width - 1, channels] are the last inputs of the convolution, whose weights are
// `conv` [width, channels]; `states` are [num_slots, heads, state_dim, head_dim]; `conv_bias` may be null. `convolved`
// [rows, channels] is for intermediate results; y is [rows, heads x head_dim]. Strides are those of rows and slots, in
// elements.
struct MambaStep {
    const void *projected;
    const int64_t *slots;
    void *tails;
    float *states;
    const void *conv;
    const void *conv_bias;
    const float *decay;
    const float *step_bias;
    const float *skip;
    float *convolved;
    float *y;
    int64_t rows, groups, heads, state_dim, head_dim, width, num_slots;
    int64_t projected_stride, tail_stride, state_stride;
    int32_t type;

    int64_t inner() const { return heads * head_dim; }
    int64_t channels() const { return inner() + 2 * groups * state_dim; }
};

namespace mamba {

using namespace recurrent;

constexpr int64_t PART = 512;  // channels that a thread convolves at once

template <typename T>
void convolve(const MambaStep &job, int64_t row, int64_t first) {
    const Convolution<T> conv = {static_cast<const T *>(job.conv), static_cast<const T *>(job.conv_bias),
                                 job.channels(), job.width};
    const T *inputs = static_cast<const T *>(job.projected) + row * job.projected_stride + job.inner();
    T *tail = static_cast<T *>(job.tails) + job.slots[row] * job.tail_stride;
    const int64_t left = job.channels() - first;
    conv.step(inputs, tail, first, left < PART ? left : PART, job.convolved + row * job.channels() + first);
}

template <typename T>
void head(const MambaStep &job, int64_t row, int64_t h) {
    const T *projected = static_cast<const T *>(job.projected) + row * job.projected_stride;
    const T *steps = projected + job.inner() + job.channels(), *gate = projected + h * job.head_dim;
    const float *convolved = job.convolved + row * job.channels(), *value = convolved + h * job.head_dim;
    const float *write = convolved + job.inner() + h / (job.heads / job.groups) * job.state_dim;
    const float step = softplus(as_float(steps[h]) + job.step_bias[h]);
    const Token token = {write + job.groups * job.state_dim, write, value, std::exp(-std::exp(job.decay[h]) * step),
                         step};
    float *y = job.y + row * job.inner() + h * job.head_dim;
    update<false>(token, job.states + job.slots[row] * job.state_stride + h * job.state_dim * job.head_dim,
                  job.state_dim, job.head_dim, y);
    const Vector skip = all(job.skip[h]);
    by_vectors(0, job.head_dim, [&](int64_t i, int64_t left) {
        const Vector out = multiply_add(take(value + i, left), skip, take(y + i, left));
        put(y + i, multiply(out, silu(take(gate + i, left))), left);
    });
}

// Calls `body` for all tasks below `count`, on some threads.
template <typename Body>
void spread(int64_t count, int32_t threads, const Body &body) {
    std::atomic<int64_t> next{0};
    threads::together(count < threads ? int32_t(count) : threads, [&] {
        for (int64_t at; (at = next.fetch_add(1)) < count;) body(at);
    });
}

template <typename T>
void step(const MambaStep &job, int32_t threads) {
    if (job.rows * job.heads * job.state_dim * job.head_dim < ALONE) threads = 1;
    const int64_t parts = (job.channels() + PART - 1) / PART;
    spread(job.rows * parts, threads, [&](int64_t at) { convolve<T>(job, at / parts, at % parts * PART); });
    spread(job.rows * job.heads, threads, [&](int64_t at) { head<T>(job, at / job.heads, at % job.heads); });
}

}  // namespace mamba

// All slots are checked before anything is changed.
extern "C" EXPORTED int32_t sagellm_mamba_step(const MambaStep *job, int32_t threads) {
    for (int64_t row = 0; row < job->rows; row++)
        if (job->slots[row] < 0 || job->slots[row] >= job->num_slots) return BAD_INDEX;
    return by_type(job->type, [&](auto number) {
        mamba::step<decltype(number)>(*job, threads);
        return DONE;
    });
}
