// Mixture of experts, but for its matrices: which experts a token gets, and the weighted sum of their rows.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>

#include "interface.h"
#include "numbers.h"
#include "scratch.h"
#include "vector.h"

// Of each row of `logits` [rows, experts], the best `per_token` experts. `weights` and `places` are [rows, per_token];
// `tokens` [rows x per_token] and `starts` [experts + 1] describe rows sorted by expert. Scores are softmax or sigmoid;
// `correction` [experts], or null, is added for the choice. Experts are chosen from the `kept_groups` of `groups` whose
// best `group_best` have the largest sum. Each call adds the number of rows of each expert to `counts` [experts].
struct Route {
    const float *logits;
    const float *correction;
    float *weights;
    int64_t *places;
    int64_t *tokens;
    int64_t *starts;
    int64_t *counts;
    int64_t rows, experts, per_token, groups, kept_groups, group_best;
    float scale;
    int32_t is_sigmoid, renormalize;
};

// y[rows, columns]: each row is the sum of `per_token` rows of x by their weights, and of the row of `added`, if given.
struct Combine {
    const void *x;
    const float *weights;
    const int64_t *places;
    const void *added;
    void *y;
    int64_t rows, columns, per_token, x_rows;
    int32_t type;
};

namespace experts {

constexpr int64_t ALONE = 8, BLOCK = 64;

// The largest of `count` numbers that is not taken; a NaN is smaller than all.
inline int64_t best_of(const float *numbers, const uint8_t *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

inline void score(const Route &job, const float *logits, float *scores) {
    float most = -std::numeric_limits<float>::infinity(), sum = 0.0f;
    for (int64_t e = 0; e < job.experts; e++) most = std::max(most, logits[e]);
    for (int64_t e = 0; e < job.experts; e++) {
        scores[e] = job.is_sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - most);
        sum += scores[e];
    }
    for (int64_t e = 0; !job.is_sigmoid && e < job.experts; e++) scores[e] /= sum;
}

// Takes the experts of all groups but the best. `best` has room for a group and for a number of each group.
inline void take_other_groups(const Route &job, const float *rank, float *best, uint8_t *taken) {
    const int64_t size = job.experts / job.groups;
    float *sums = best + size;
    uint8_t *kept = taken + job.experts;
    for (int64_t g = 0; g < job.groups; g++) {
        std::copy(rank + g * size, rank + (g + 1) * size, best);
        std::partial_sort(best, best + job.group_best, best + size, std::greater<float>());
        sums[g] = 0.0f;
        for (int64_t i = 0; i < job.group_best; i++) sums[g] += best[i];
        kept[g] = 0;
    }
    for (int64_t i = 0; i < job.kept_groups; i++) kept[best_of(sums, kept, job.groups)] = 1;
    for (int64_t e = 0; e < job.experts; e++) taken[e] = !kept[e / size];
}

// Writes the weights of a row, and its experts as places. `floats` has room for 4, `taken` for 2 of each expert.
inline void choose(const Route &job, int64_t row, float *floats, uint8_t *taken) {
    float *scores = floats, *rank = floats + job.experts, *weights = job.weights + row * job.per_token;
    score(job, job.logits + row * job.experts, scores);
    for (int64_t e = 0; e < job.experts; e++) rank[e] = scores[e] + (job.correction ? job.correction[e] : 0.0f);
    std::fill(taken, taken + job.experts, 0);
    if (job.groups > 1) take_other_groups(job, rank, rank + job.experts, taken);
    float sum = 0.0f;
    for (int64_t j = 0; j < job.per_token; j++) {
        const int64_t expert = best_of(rank, taken, job.experts);
        taken[expert] = 1, weights[j] = scores[expert], sum += weights[j];
        job.places[row * job.per_token + j] = expert;
    }
    const float factor = job.renormalize ? job.scale / (sum + 1e-20f) : job.scale;
    for (int64_t j = 0; j < job.per_token; j++) weights[j] *= factor;
}

// Turns experts into places of rows sorted by expert, in an expert in order of tokens.
inline void sort(const Route &job, int64_t *next) {
    const int64_t pairs = job.rows * job.per_token;
    std::fill(next, next + job.experts, 0);
    for (int64_t i = 0; i < pairs; i++) next[job.places[i]]++;
    job.starts[0] = 0;
    for (int64_t e = 0; e < job.experts; e++) {
        job.starts[e + 1] = job.starts[e] + next[e];
        job.counts[e] += next[e];
        next[e] = job.starts[e];
    }
    for (int64_t i = 0; i < pairs; i++) {
        job.places[i] = next[job.places[i]]++;
        job.tokens[job.places[i]] = i / job.per_token;
    }
}

// Returns false if there is no memory.
inline bool route(const Route &job, int32_t threads) {
    static thread_local Scratch scratch;
    const size_t experts = size_t(job.experts);
    std::atomic<bool> failed{false};
    std::atomic<int64_t> next{0};
    threads::together(job.rows < ALONE ? 1 : threads, [&] {
        auto *floats = static_cast<float *>(scratch.at_least(experts * (4 * sizeof(float) + 2)));
        if (!floats) failed = true;
        for (int64_t row; !failed && (row = next.fetch_add(1)) < job.rows;)
            choose(job, row, floats, reinterpret_cast<uint8_t *>(floats + 4 * experts));
    });
    auto *places = static_cast<int64_t *>(scratch.at_least(experts * sizeof(int64_t)));
    if (failed || !places) return false;
    sort(job, places);
    return true;
}

template <typename X>
void combine(const Combine &job, int32_t threads) {
    std::atomic<int64_t> next{0};
    threads::together(job.rows < ALONE ? 1 : threads, [&] {
        for (int64_t row; (row = next.fetch_add(1)) < job.rows;) {
            const float *weights = job.weights + row * job.per_token;
            const int64_t *places = job.places + row * job.per_token;
            for (int64_t first = 0; first < job.columns; first += BLOCK) {
                const int64_t count = std::min(BLOCK, job.columns - first), at = row * job.columns + first;
                float sums[BLOCK];
                for (int64_t n = 0; n < count; n++)
                    sums[n] = job.added ? as_float(static_cast<const X *>(job.added)[at + n]) : 0.0f;
                for (int64_t j = 0; j < job.per_token; j++) {
                    const X *x = static_cast<const X *>(job.x) + places[j] * job.columns + first;
                    int64_t n = 0;
                    for (const Vector weight = all(weights[j]); n + WIDTH <= count; n += WIDTH)
                        save(sums + n, multiply_add(load(x + n), weight, load(sums + n)));
                    for (; n < count; n++) sums[n] += weights[j] * as_float(x[n]);
                }
                for (int64_t n = 0; n < count; n++) round_to(sums[n], static_cast<X *>(job.y)[at + n]);
            }
        }
    });
}

}  // namespace experts

extern "C" {

EXPORTED int32_t sagellm_route(const Route *job, int32_t threads) {
    return experts::route(*job, threads) ? DONE : NO_MEMORY;
}

EXPORTED int32_t sagellm_combine(const Combine *job, int32_t threads) {
    const int64_t pairs = job->rows * job->per_token;
    for (int64_t i = 0; i < pairs; i++)
        if (job->places[i] < 0 || job->places[i] >= job->x_rows) return BAD_INDEX;
    switch (job->type) {
        case FLOAT32: experts::combine<float>(*job, threads); return DONE;
        case BFLOAT16: experts::combine<BFloat16>(*job, threads); return DONE;
        case FLOAT16: experts::combine<Float16>(*job, threads); return DONE;
        default: return NO_KERNEL;
    }
}

}  // extern "C"
