// What lies between the matrices on heap buffers of exact size, against sums in double: run under sanitizers by
// test_cpu_library.py.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "glue.cpp"

namespace {

std::mt19937 chance(13);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }

// Numbers of about unit size in T, in a buffer without a byte behind them.
template <typename T>
struct Numbers {
    std::unique_ptr<T[]> data;
    int64_t count;

    explicit Numbers(int64_t size) : data(new T[size_t(size)]), count(size) {
        for (int64_t i = 0; i < size; i++) round_to(float(between(-2000, 2000)) / 700.0f, data[size_t(i)]);
    }
    double operator[](int64_t i) const { return as_float(data[size_t(i)]); }
    std::vector<double> values() const {
        std::vector<double> all;
        for (int64_t i = 0; i < count; i++) all.push_back((*this)[i]);
        return all;
    }
};

template <typename T>
constexpr double BOUND = sizeof(T) == 4 ? 1e-5 : 2e-2;

template <typename T>
bool close(double found, double expected, const char *what) {
    if (std::fabs(found - expected) <= BOUND<T> * (1 + std::fabs(expected))) return true;
    std::printf("%s: %g, not %g\n", what, found, expected);
    return false;
}

double scale_of(const double *x, int64_t count, double eps) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return 1.0 / std::sqrt(sum / double(count) + eps);
}

template <typename T>
bool norms(int32_t type) {
    const int64_t rows = between(1, 90), columns = between(1, 600), with_delta = between(0, 1);
    const bool with_own = with_delta && between(0, 1);
    Numbers<T> x(rows * columns), delta(rows * columns), own(columns), weight(columns), y(rows * columns);
    const std::vector<double> before = x.values(), added = delta.values();
    const AddNorm job = {x.data.get(), with_delta ? delta.data.get() : nullptr, with_own ? own.data.get() : nullptr,
                         weight.data.get(), y.data.get(), rows, columns, columns, columns, columns, 1e-5f, type};
    if (sagellm_add_norm(&job, 2) != DONE) return false;
    const std::vector<double> after = x.values();
    for (int64_t i = 0; i < rows * columns; i++) {
        const double *delta_row = &added[size_t(i / columns * columns)];
        const double factor = with_own ? scale_of(delta_row, columns, 1e-5) * own[i % columns] : 1.0;
        const double sum = before[size_t(i)] + (with_delta ? delta[i] * factor : 0.0);
        const double *row = &after[size_t(i / columns * columns)];
        if (!close<T>(after[size_t(i)], sum, "sum")) return false;
        if (!close<T>(y[i], row[i % columns] * scale_of(row, columns, 1e-5) * weight[i % columns], "norm")) return false;
    }
    return true;
}

template <typename T>
bool products(int32_t type) {
    const int64_t rows = between(1, 20), columns = between(1, 5000);
    const bool clamped = between(0, 1);
    Numbers<T> wide(2 * rows * columns), y(rows * columns);
    const Gated job = {wide.data.get(), y.data.get(), rows, columns, 2 * columns, columns, 1.25f, 1.5f, type,
                       clamped ? CLAMPED : SILU};
    if (sagellm_gated(&job, 2) != DONE) return false;
    for (int64_t i = 0; i < rows * columns; i++) {
        const int64_t at = i / columns * 2 * columns + i % columns;
        const double gate = clamped ? std::min(wide[at], 1.25) : wide[at], up = wide[at + columns];
        const double factor = clamped ? std::clamp(up, -1.25, 1.25) + 1 : up, z = clamped ? 1.5 * gate : gate;
        if (!close<T>(y[i], gate / (1 + std::exp(-z)) * factor, "product")) return false;
    }
    return true;
}

// The pools have exactly as many slots as rows; each row has its own, from the last to the first.
template <typename T, typename P>
bool rotations(int32_t type, int32_t pool_type) {
    const int64_t size = between(1, 5), blocks = between(1, 12), kv_heads = between(1, 3), query_heads = between(0, 4);
    const int64_t rows = size * blocks, half = between(1, 40), dim = 2 * half, heads = query_heads + 2 * kv_heads;
    const bool is_normed = between(0, 1), is_turned = between(0, 3);
    Numbers<T> all(rows * heads * dim), cos(rows * half), sin(rows * half), weight(dim);
    Numbers<P> keys(rows * kv_heads * dim), values(rows * kv_heads * dim);
    std::unique_ptr<int64_t[]> slots(new int64_t[size_t(rows)]);
    for (int64_t i = 0; i < rows; i++) slots[size_t(i)] = rows - 1 - i;
    const std::vector<double> before = all.values();
    const int64_t token = kv_heads * dim;
    const bool norms_values = between(0, 1);
    const Rotate job = {all.data.get(), is_turned ? cos.data.get() : nullptr, is_turned ? sin.data.get() : nullptr,
                        is_normed ? weight.data.get() : nullptr, is_normed ? weight.data.get() : nullptr, slots.get(),
                        {keys.data.get(), size * token, token, dim}, {values.data.get(), size * token, token, dim},
                        rows, query_heads, kv_heads, dim, heads * dim, half, blocks, size, 1e-5f, 1e-4f, type, pool_type, 0,
                        norms_values};
    if (sagellm_rotate(&job, 2) != DONE) return false;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = (row * heads + h) * dim, kv_head = h - query_heads;
            std::vector<double> head(&before[size_t(at)], &before[size_t(at)] + dim);
            const bool is_value = kv_head >= kv_heads;
            const bool scales = is_value ? norms_values : is_normed;
            const double scale = scales ? scale_of(head.data(), dim, is_value ? 1e-4 : 1e-5) : 0.0;
            if (scale)
                for (int64_t d = 0; d < dim; d++) head[size_t(d)] *= scale * (is_value ? 1.0 : double(weight[d]));
            for (int64_t d = 0; d < dim; d++) {
                const int64_t angle = row * half + d % half;
                const double other = head[size_t(d < half ? d + half : d - half)], turn = d < half ? -other : other;
                const bool turned = is_turned && !is_value;
                const double expected = turned ? head[size_t(d)] * cos[angle] + turn * sin[angle] : head[size_t(d)];
                if (!close<T>(all[at + d] / 4, expected / 4, "head")) return false;
                if (kv_head < 0) continue;
                const Numbers<P> &pool = is_value ? values : keys;
                const int64_t slot = slots[size_t(row)] * token + kv_head % kv_heads * dim + d;
                if (!close<P>(pool[slot], all[at + d], "slot")) return false;
            }
        }
    slots[size_t(rows) - 1] = between(0, 1) ? -1 : rows;
    return sagellm_rotate(&job, 2) == BAD_SLOT;
}

template <typename T>
bool one(int32_t type) {
    return norms<T>(type) && products<T>(type) && rotations<T, float>(type, FLOAT32) &&
           rotations<T, BFloat16>(type, BFLOAT16) && rotations<T, Float16>(type, FLOAT16);
}

}  // namespace

int main() {
    for (int i = 0; i < 40; i++)
        if (!one<float>(FLOAT32) || !one<BFloat16>(BFLOAT16) || !one<Float16>(FLOAT16)) return 1;
    std::printf("600 jobs compared\n");
    return 0;
}
