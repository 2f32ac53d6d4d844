// The kernels on heap buffers of exact size: run under sanitizers by test_cpu_library.py.

#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "experts.cpp"

namespace {

std::mt19937 chance(7);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }

std::vector<float> numbers(int64_t count) {
    std::vector<float> made(size_t(count), 0.0f);
    std::normal_distribution<float> normal;
    for (float &number : made) number = normal(chance);
    return made;
}

bool fails(const char *what) {
    std::printf("%s\n", what);
    return false;
}

// Routes random logits, checks that places and tokens are each other's inverses, and combines rows.
bool works(int32_t threads) {
    const int64_t groups = between(1, 4), size = between(2, 9), experts = groups * size, rows = between(0, 40);
    const int64_t kept = between(1, groups), per_token = between(1, kept * size), columns = between(1, 100);
    const std::vector<float> logits = numbers(rows * experts), correction = numbers(experts);
    std::vector<float> weights(size_t(rows * per_token));
    std::vector<int64_t> places(size_t(rows * per_token)), tokens(places.size()), starts(size_t(experts + 1));
    std::vector<int64_t> counts(size_t(experts), 5);
    const Route route = {logits.data(),  between(0, 1) ? correction.data() : nullptr,
                         weights.data(), places.data(),
                         tokens.data(),  starts.data(),
                         counts.data(),  rows,
                         experts,        per_token,
                         groups,         kept,
                         between(1, 2),  1.5f,
                         int32_t(between(0, 1)), int32_t(between(0, 1))};
    if (sagellm_route(&route, threads) != DONE) return fails("not routed");
    if (starts.front() || starts.back() != rows * per_token) return fails("starts");
    for (int64_t e = 0; e < experts; e++)
        if (counts[size_t(e)] - 5 != starts[size_t(e + 1)] - starts[size_t(e)]) return fails("counts");
    for (size_t i = 0; i < places.size(); i++)
        if (tokens[size_t(places[i])] != int64_t(i) / per_token) return fails("places");
    const std::vector<float> x = numbers(rows * per_token * columns), added = numbers(rows * columns);
    std::vector<float> y(size_t(rows * columns));
    const Combine combine = {x.data(),      weights.data(), places.data(), between(0, 1) ? added.data() : nullptr,
                             y.data(),      rows,           columns,       per_token,
                             rows * per_token, FLOAT32};
    if (sagellm_combine(&combine, threads) != DONE) return fails("not combined");
    for (int64_t t = 0; t < rows; t++)
        for (int64_t n = 0; n < columns; n++) {
            double sum = combine.added ? added[size_t(t * columns + n)] : 0.0;
            for (int64_t j = 0; j < per_token; j++) {
                const size_t pair = size_t(t * per_token + j);
                sum += double(weights[pair]) * x[size_t(places[pair] * columns + n)];
            }
            if (!(std::fabs(sum - y[size_t(t * columns + n)]) < 1e-3)) return fails("sums");
        }
    return true;
}

}  // namespace

int main() {
    for (int i = 0; i < 400; i++)
        if (!works(1 + i % 3)) return 1;
    std::printf("400 jobs compared\n");
    return 0;
}
